"""Weights as exact products read them: in the precision of the pass and, on a CPU, in oneDNN's layout.

Learner and engine read the same copies. A copy is made again when its weight has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PACKED_FOR_ROWS = 32  # batch size that oneDNN chooses its layout for; others work too


@dataclass(frozen=True, eq=False)
class _WeightCopy:
    owner: Tensor  # kept, so that its id stays its own
    address: int
    version: int
    copy: Tensor


class PackedWeights:
    """Copies of a model's weights, made when they are first read."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], _WeightCopy] = {}

    def __deepcopy__(self, memo: Any) -> PackedWeights:
        return PackedWeights()  # of another model

    def get(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the copy of a weight [N, K]: a parameter, or a view of one."""
        owner = weight if weight._base is None else weight._base
        if weight.dtype == dtype and not can_pack(weight.device, dtype):
            return weight
        if not isinstance(owner, nn.Parameter):
            return pack_weight(weight, dtype)
        key = (id(owner), weight.storage_offset(), weight.shape, weight.stride(), dtype)
        known = self._copies.get(key)
        if known is None or known.version != owner._version or known.address != weight.data_ptr():
            known = _WeightCopy(owner, weight.data_ptr(), owner._version, pack_weight(weight, dtype))
            self._copies[key] = known
        return known.copy

    def clear(self) -> None:
        """Drop all copies, after weights changed by other means than in-place operations."""
        self._copies.clear()

    def find_stale(self, weight: Tensor) -> Tensor | None:
        """Return a copy of a parameter that generation would read although it differs from it, dense, or None."""
        for (owner, _, shape, _, dtype), known in self._copies.items():
            fresh = owner == id(weight) and shape == weight.shape and known.version == weight._version
            if fresh and not torch.equal(dense := _to_dense(known.copy), weight.to(dtype)):
                return dense
        return None


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN has a layout for weights of this dtype on the device: not in bfloat16 on a CPU without AVX-512."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    supported: bool = dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return supported


@torch.no_grad()
def pack_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight [N, K] as ``multiply_packed`` reads it."""
    weight = weight.detach().to(dtype)
    if not can_pack(weight.device, dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
    return packed


def multiply_packed(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product [n, N] of rows [n, K] with a weight of ``pack_weight``."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return product
    return nn.functional.linear(rows, weight, bias)


def _to_dense(copy: Tensor) -> Tensor:
    return copy.to_dense() if copy.is_mkldnn else copy
