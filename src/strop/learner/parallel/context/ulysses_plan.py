"""Attention of context ranks by an all-to-all over heads (DeepSpeed-Ulysses, arXiv 2309.14509).

Each rank attends to all tokens with some heads as a single device would, so prefixes, windows and softcaps need no special handling.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from strop.learner.parallel.collectives import all_to_all
from strop.models.attention.attention_plan import AttentionPlan, AttentionSpec
from strop.models.mixers.recurrence import MixerSpec, Recurrence, Rows

dist: Any = torch.distributed
Group = Any  # torch.distributed.ProcessGroup


class UlyssesPlan:
    """An attention plan that exchanges some tokens of all heads for all tokens of some heads, and calls ``plan`` with these."""

    def __init__(self, plan: AttentionPlan, group: Group, length: int) -> None:
        self.plan: Any = plan  # a MixerPlan as well, for recurrent layers
        self.group = group
        self.world_size: int = dist.get_world_size(group)
        self.length = length  # tokens of the row without padding

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """[t, heads, D] -> [t, heads, D]; the number of heads must be a multiple of the number of ranks."""
        kv_heads = key.shape[1]
        repeats = self.world_size // gcd(kv_heads, self.world_size)
        if repeats > 1:  # send a key to every rank with a query head that uses it
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        query, key, value = self._to_heads(query, key, value)
        padding = len(query) - self.length
        query, key, value = (tensor[: self.length] for tensor in (query, key, value))
        if spec.sinks is not None and self.world_size > 1:
            spec = replace(spec, sinks=spec.sinks.chunk(self.world_size)[dist.get_rank(self.group)])
        attended = self.plan.attend(query, key, value, spec)
        return self._to_tokens(pad(attended, (0, 0, 0, 0, 0, padding)) if padding else attended)

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, spec: MixerSpec) -> Tensor:
        """[t, C] -> [t, C], with the channels of this rank for all tokens in between."""
        rank = dist.get_rank(self.group)
        weight, bias = weight.chunk(self.world_size)[rank], None if bias is None else bias.chunk(self.world_size)[rank]
        rows = self._to_heads(inputs.unsqueeze(-1))[0]
        outputs = self.plan.convolve(rows[: self.length].squeeze(-1), weight, bias, spec).unsqueeze(-1)
        return self._to_tokens(pad(outputs, (0, 0, 0, 0, 0, len(rows) - self.length))).squeeze(-1)

    def scan(self, recurrence: Recurrence, rows: Rows, spec: MixerSpec) -> Tensor:
        """Rows [t, heads, ...] -> [t, heads, V], with the states of this rank's heads for all tokens in between."""
        heads = recurrence.state_shape[0]
        if any(row.shape[1] % self.world_size for row in rows):  # groups of heads with the same keys
            rows = [row.repeat_interleave(heads // row.shape[1], dim=1) for row in rows]
        wide = self._to_heads(*(row if row.dim() == 3 else row.unsqueeze(-1) for row in rows))
        local = [all_[: self.length].flatten(2 if row.dim() == 3 else 1) for all_, row in zip(wide, rows, strict=True)]
        recurrence = replace(recurrence, state_shape=(heads // self.world_size, *recurrence.state_shape[1:]))
        outputs = self.plan.scan(recurrence, local, spec)
        return self._to_tokens(pad(outputs, (0, 0, 0, 0, 0, len(wide[0]) - self.length)))

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """[t, heads, D] each -> [ranks * t, heads / ranks, D] each, in one exchange."""
        if self.world_size == 1:
            return list(tensors)
        blocks = [tensor.unflatten(1, (self.world_size, -1)) for tensor in tensors]  # [t, ranks, heads / ranks, D]
        rows = torch.cat([block.flatten(2) for block in blocks], dim=2).transpose(0, 1).flatten(0, 1)
        received = all_to_all(rows, self.group).split([block.shape[2] * block.shape[3] for block in blocks], dim=1)
        return [rows.unflatten(1, block.shape[2:]) for rows, block in zip(received, blocks, strict=True)]

    def _to_tokens(self, attended: Tensor) -> Tensor:
        """[ranks * t, heads / ranks, D] -> [t, heads, D]."""
        if self.world_size == 1:
            return attended
        received: Tensor = all_to_all(attended, self.group).unflatten(0, (self.world_size, -1))  # type: ignore[no-untyped-call]
        return received.transpose(0, 1).flatten(1, 2)
