"""Keys and values of a draft head: a growing row of places for each running request."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.extensions.labs.draft.eagle_config import EagleShape
from strop.models.attention.attention_plan import AttentionSpec

SPAN_STEP = 64  # places


class DraftCache:
    """Keys and values [layers, rows, heads, places, D]."""

    def __init__(self, shape: EagleShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.keys = torch.zeros(shape.layers, 0, shape.kv_heads, 0, shape.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self._free: list[int] = []

    def take_row(self) -> int:
        """Return an unused row."""
        if not self._free:
            rows = self.keys.shape[1]
            self._grow(max(4, rows), 0)
            self._free = list(range(self.keys.shape[1] - 1, rows - 1, -1))
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def reach(self, places: int) -> None:
        """Make room for this many places in each row."""
        have = self.keys.shape[3]
        if places > have:
            self._grow(0, -(-max(places, have + have // 2) // SPAN_STEP) * SPAN_STEP - have)

    def _grow(self, rows: int, places: int) -> None:
        padding = (0, 0, 0, places, 0, 0, 0, rows)
        self.keys, self.values = F.pad(self.keys, padding), F.pad(self.values, padding)

    def copy_row(self, source: int, target: int, places: int) -> None:
        """Copy the first places of a row."""
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :places] = tensor[:, source, :, :places]


class DraftCachePlan:
    """Attention of w new places of each of B rows to all places up to their own; writes their keys and values."""

    def __init__(self, cache: DraftCache, rows: Tensor, places: Tensor) -> None:
        """``rows`` [B] int64, ``places`` [B, w] int64, ascending; a repeated place is written with the same values."""
        self.cache, self.rows, self.places = cache, rows, places
        self.span = int(places.max()) + 1
        self.visible = torch.arange(self.span, device=places.device) <= places[:, :, None]  # [B, w, span]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        keys, values = self.cache.keys[spec.layer], self.cache.values[spec.layer]
        rows, width = self.places.shape
        where = self.rows[:, None].expand(rows, width).flatten(), self.places.flatten()
        keys[where[0], :, where[1]] = key.to(keys.dtype)
        values[where[0], :, where[1]] = value.to(keys.dtype)
        grouped = query.to(keys.dtype).unflatten(0, (rows, width)).transpose(1, 2)  # [B, heads, w, D]
        attended = F.scaled_dot_product_attention(
            grouped,
            keys[self.rows, :, : self.span],
            values[self.rows, :, : self.span],
            self.visible[:, None],
            scale=spec.scale,
            enable_gqa=True,
        )
        return attended.transpose(1, 2).flatten(0, 1).to(query.dtype)
