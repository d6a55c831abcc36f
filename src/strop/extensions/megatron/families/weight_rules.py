"""Where a weight of the Hugging Face model is in Megatron Core's, which fuses some and divides most over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch


class Piece(NamedTuple):
    """Rows of a Hugging Face weight that are adjacent in the whole Megatron Core parameter, that of all ranks one after another."""

    whole: int  # the first of them in the whole parameter
    start: int  # in the Hugging Face weight
    length: int


class RowOrder(Protocol):
    """How the rows of a Hugging Face weight lie in a whole parameter."""

    def pieces(self, rows: int, ranks: int) -> Sequence[Piece]:
        """Return where ``rows`` rows are in a parameter that ``ranks`` ranks share."""
        ...

    def size(self, rows: int, ranks: int) -> int:
        """Return the rows of the whole parameter."""
        ...


@dataclass(frozen=True)
class SameOrder:
    """The parameter is the weight, with rows of padding if ``padded``."""

    padded: bool = False

    def pieces(self, rows: int, ranks: int) -> Sequence[Piece]:
        return (Piece(0, 0, rows),)

    def size(self, rows: int, ranks: int) -> int:
        return -(-rows // ranks) * ranks if self.padded else rows


@dataclass(frozen=True)
class QkvOrder:
    """Queries, keys and values in one parameter: for each group of heads its queries, its key, its value."""

    heads: int
    groups: int
    head_size: int
    part: int  # 0 queries, 1 keys, 2 values

    def pieces(self, rows: int, ranks: int) -> Sequence[Piece]:
        queries = self.heads // self.groups * self.head_size
        offset = (0, queries, queries + self.head_size)[self.part]
        length = queries if self.part == 0 else self.head_size
        stride = queries + 2 * self.head_size
        return [Piece(group * stride + offset, group * length, length) for group in range(self.groups)]

    def size(self, rows: int, ranks: int) -> int:
        return (self.heads + 2 * self.groups) * self.head_size


@dataclass(frozen=True)
class GatedOrder:
    """Gate and up projection in one parameter: each rank has its rows of the gate, then its rows of the other."""

    part: int | None  # 0 gate, 1 up; None: the weight has both, first the whole gate

    def pieces(self, rows: int, ranks: int) -> Sequence[Piece]:
        parts = (0, 1) if self.part is None else (self.part,)
        length = self.size(rows, ranks) // 2 // ranks
        return [
            Piece((2 * rank + part) * length, (index * ranks + rank) * length, length)
            for index, part in enumerate(parts)
            for rank in range(ranks)
        ]

    def size(self, rows: int, ranks: int) -> int:
        return rows if self.part is None else 2 * rows


@dataclass(frozen=True)
class WeightRule:
    """A weight's two names. ``layers.`` at the beginning stands for the layer's module, ``{expert}`` for the expert."""

    name: str  # in the Hugging Face model
    parameter: str  # in a stage
    dim: int | None = None  # of a matrix, that tensor-parallel ranks divide
    order: RowOrder = field(default=SameOrder())
    dtype: torch.dtype | None = None  # None is that of the model
    aliases: tuple[str, ...] = ()  # other names that files have for it
    # For the experts of a layer, one tensor in the module: the names of one expert's parts in files that have them separately.
    expert_files: tuple[str, ...] = ()

    @property
    def of_experts(self) -> bool:
        return "{expert}" in self.parameter


def qkv_rules(heads: int, groups: int, head_size: int) -> Sequence[WeightRule]:
    return [
        WeightRule(
            f"layers.self_attn.{part}_proj.{kind}",
            f"layers.self_attention.linear_qkv.{kind}",
            0,
            QkvOrder(heads, groups, head_size, index),
        )
        for index, part in enumerate("qkv")
        for kind in ("weight", "bias")
    ]


def glu_rules(name: str, parameter: str) -> Sequence[WeightRule]:
    """Return the rules of a gated MLP, from the names of its modules in a layer."""
    return (
        WeightRule(f"layers.{name}gate_proj.weight", f"layers.{parameter}linear_fc1.weight", 0, GatedOrder(0)),
        WeightRule(f"layers.{name}up_proj.weight", f"layers.{parameter}linear_fc1.weight", 0, GatedOrder(1)),
        WeightRule(f"layers.{name}down_proj.weight", f"layers.{parameter}linear_fc2.weight", 1),
    )


def expert_rules(gate: str, up: str, down: str, files: str = "layers.mlp.experts") -> Sequence[WeightRule]:
    """Return the rules of routed experts; ``gate``, ``up`` and ``down`` are the names that files have for an expert's matrices."""
    apart = f"{files}.{{expert}}"
    local = "layers.mlp.experts.local_experts.{expert}"
    return (
        WeightRule(
            "layers.mlp.experts.gate_up_proj",
            f"{local}.linear_fc1.weight",
            0,
            GatedOrder(None),
            expert_files=(f"{apart}.{gate}.weight", f"{apart}.{up}.weight"),
        ),
        WeightRule("layers.mlp.experts.down_proj", f"{local}.linear_fc2.weight", 1, expert_files=(f"{apart}.{down}.weight",)),
    )
