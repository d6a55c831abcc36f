"""Read back the routed experts of a vLLM model, one expert at a time.

vLLM keeps the experts of a layer in two tensors, ``w13`` (gate and up) and ``w2`` (down), for the experts of this process
(expert parallelism) and its part of each (tensor parallelism). A CPU kernel stores them in its own padded order. That order is
found by packing indices instead of weights with the same function and shapes, so each index shows where its weight went. Unknown
kernel layouts are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_DIGIT = 256  # indices are packed in digits to this base, which every floating-point type holds exactly


@dataclass(frozen=True, eq=False)
class ExpertShard:
    """The part of one expert on this process."""

    name: str  # of the tensor with all experts of its layer
    expert: int  # its row in that tensor
    values: Tensor  # as in the tensor, with zeros for parts on other processes
    part: tuple[int, int]  # the first row of gate, up or down on this process, and their number


def read_experts(layer: Any) -> Iterator[ExpertShard]:
    """Yield each expert of a layer of routed experts, for each of its tensors; nothing for an unknown layout."""
    unpack = _find_layout(layer)
    if unpack is None:
        return
    part = _ExpertPart.of(layer)
    readers: list[tuple[str, Callable[[int], Tensor]]] = [
        ("gate_up_proj", lambda slot: part.place_gate_up(unpack(layer.w13_weight[slot]))),
        ("down_proj", lambda slot: part.place_down(unpack(layer.w2_weight[slot]))),
    ]
    if layer.moe_config.has_bias:
        readers.append(("gate_up_proj_bias", lambda slot: part.place_gate_up(layer.w13_bias[slot])))
        if part.rank == 0:  # the other ranks hold zeros, and each adds its own
            readers.append(("down_proj_bias", lambda slot: layer.w2_bias[slot, : part.hidden]))
    for name, read in readers:
        for slot, expert in enumerate(_global_experts(layer)):
            yield ExpertShard(name, expert, read(slot), (part.first, part.size))


def _global_experts(layer: Any) -> list[int]:
    """Return the model's expert in each slot of this process."""
    mapping = layer.expert_map_manager.expert_map
    if mapping is None:
        return list(range(layer.local_num_experts))
    slots = {int(slot): expert for expert, slot in enumerate(mapping.tolist()) if slot >= 0}
    return [slots[slot] for slot in range(len(slots))]


@dataclass(frozen=True)
class _ExpertPart:
    """The rows of an expert's gate and up matrices, and columns of its down matrix, computed by this process."""

    first: int
    size: int  # without padding
    full: int  # of all processes together
    hidden: int
    interleaved: bool  # rows of gate and up alternate, and the canonical matrices are transposed: gpt-oss
    rank: int

    @classmethod
    def of(cls, layer: Any) -> _ExpertPart:
        config = layer.moe_config
        parallel = config.moe_parallel_config
        full = config.intermediate_size
        most = -(-full // parallel.tp_size)
        first = min(parallel.tp_rank * most, full)
        interleaved = config.activation.value == "swigluoai"
        return cls(first, min(most, full - first), full, config.hidden_dim_unpadded, interleaved, parallel.tp_rank)

    def place_gate_up(self, held: Tensor) -> Tensor:
        """Place [2 x padded size, ...] among zeros in [2 x full, ...], or its transpose."""
        placed = held.new_zeros(2 * self.full, *held.shape[1:])
        if self.interleaved:
            placed[2 * self.first : 2 * (self.first + self.size)] = held[: 2 * self.size]
        else:
            half = len(held) // 2
            for start, offset in ((0, 0), (half, self.full)):
                placed[offset + self.first : offset + self.first + self.size] = held[start : start + self.size]
        if placed.dim() == 1:
            return placed
        placed = placed[:, : self.hidden]
        return placed.t() if self.interleaved else placed

    def place_down(self, held: Tensor) -> Tensor:
        """Place [hidden, padded size] among zeros in [hidden, full], or its transpose."""
        placed = held.new_zeros(self.hidden, self.full)
        placed[:, self.first : self.first + self.size] = held[: self.hidden, : self.size]
        return placed.t() if self.interleaved else placed


class _PackedLayout:
    """Experts in the order of a CPU kernel."""

    def __init__(self, isa: str) -> None:
        self.isa = isa

    def __call__(self, packed: Tensor) -> Tensor:
        """Return an expert's matrix in its natural order, still padded."""
        natural = torch.empty_like(packed).flatten()
        natural[_packing_order(self.isa, tuple(packed.shape), packed.dtype)] = packed.flatten()
        return natural.view(packed.shape)


@lru_cache(maxsize=4)
def _packing_order(isa: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    from vllm._custom_ops import cpu_prepack_moe_weight

    return find_packing_order(shape, dtype, lambda weight: cpu_prepack_moe_weight(weight, isa))


def find_packing_order(shape: tuple[int, ...], dtype: torch.dtype, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """Return, for each element of ``pack(weight)``, its index in ``weight``, [rows x columns], for a function that only moves
    elements.

    ``pack`` is given [1, rows, columns]. Raises RuntimeError if it does more than move elements.
    """
    count = torch.Size(shape).numel()
    index, order, scale = torch.arange(count), torch.zeros(count, dtype=torch.long), 1
    while scale < count:
        digits = (index // scale % _DIGIT).to(dtype).reshape(1, *shape)
        order += pack(digits).flatten().long() * scale
        scale *= _DIGIT
    if not torch.equal(order.sort().values, index):
        raise RuntimeError(
            "the kernel of the experts does not store each weight exactly once, so experts cannot be read back from its layout"
        )
    return order


def _find_layout(layer: Any) -> Callable[[Tensor], Tensor] | None:
    """Return a function that unpacks an expert of a layer; None for quantised experts and unknown layouts."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = layer.quant_method
    if not isinstance(method, UnquantizedFusedMoEMethod) or not method.moe.is_act_and_mul or method.moe_kernel is None:
        return None
    if method.unquantized_backend in (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON):
        return torch.Tensor.detach
    if method.unquantized_backend is not UnquantizedMoeBackend.CPU:
        return None
    experts = method.moe_kernel.fused_experts
    return None if experts._use_zentorch else _PackedLayout(experts.isa)
