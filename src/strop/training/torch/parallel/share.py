"""What one rank runs of a batch, what it says of that, and all ranks' answers as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from strop import metrics
from strop.algorithms.base import Outputs
from strop.data.packing import Part
from strop.metrics import Metrics
from strop.training.base import BackwardResult


@dataclass(frozen=True, eq=False)
class Share:
    """A micro-batch of one rank."""

    part: Part
    idle: bool  # it has no gradient, and is read without one
    stand_in: bool = False  # it is run to keep step with other ranks, and counts nowhere


@dataclass(frozen=True, eq=False)
class Shares:
    """What a rank says of its micro-batches: nothing where another rank that read the same ones speaks for it."""

    outputs: tuple[
        tuple[Tensor, Outputs], ...
    ] = ()  # (index [n] into the whole batch's N, outputs of these n places, on the CPU)
    metrics: Metrics | None = None  # merged over its micro-batches


def assemble(answers: Sequence[Shares], size: int) -> BackwardResult:
    """The answers of all ranks as the result for a batch of ``size`` predicted tokens. Raises ValueError where one is missing."""
    logged = [answer.metrics for answer in answers if answer.metrics is not None]
    return BackwardResult(metrics=metrics.merge(*logged), outputs=assemble_outputs(answers, size))


def assemble_outputs(answers: Sequence[Shares], size: int) -> Outputs:
    """The outputs alone, [size]. Raises ValueError where the answers do not cover every place once."""
    pieces = [piece for answer in answers for piece in answer.outputs]
    covered = sum(len(index) for index, _ in pieces)
    if covered != size or not pieces:
        raise ValueError(
            f"the answers cover {covered} of the batch's {size} predicted tokens: they are those of some ranks only; put the answers of "
            "all ranks together"
        )
    first = pieces[0][1]
    columns: dict[str, Any] = {}
    for name, example in present(first):
        column = torch.zeros(size, *example.shape[1:], dtype=example.dtype)
        for index, outputs in pieces:
            column[index] = getattr(outputs, name)
        columns[name] = column
    return replace(first, **columns)


def present(outputs: Outputs) -> Iterator[tuple[str, Tensor]]:
    """The tensors of outputs by name, without those there are not."""
    for item in fields(outputs):
        if (value := getattr(outputs, item.name)) is not None:
            yield item.name, value


def kept(outputs: Outputs) -> Outputs:
    """Outputs without gradient, in float32 on the CPU."""
    columns: dict[str, Any] = {name: value.detach().float().cpu() for name, value in present(outputs)}
    return replace(outputs, **columns)
