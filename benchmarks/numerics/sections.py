"""What the page of numbers is made of: sections of rows, each of which compares Strop with a peer when it is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from conformance.cases import Sample, Step
from conformance.harness import Outcome

Numbers = tuple[float | None, ...]  # one for each column of a section; None: the row has none
NOT_RUN: Numbers = ()  # of a row whose peer is not installed


@dataclass(frozen=True)
class Row:
    """One option of Strop compared with one peer."""

    option: str
    peer: str
    measure: Callable[[], Numbers]
    note: str = ""  # one sentence, where the numbers need one


@dataclass(frozen=True)
class Section:
    """Rows with the same columns. A number above the bound of its column is a difference that the page reports."""

    title: str
    about: str
    columns: tuple[str, ...]
    bounds: tuple[float, ...]  # infinite where a difference is the point
    rows: tuple[Row, ...]


def value_difference(found: float, wanted: float) -> float:
    """Relative to the peer's value, or absolute where that is below 1."""
    return abs(found - wanted) / max(abs(wanted), 1.0)


def tensor_difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the peer's largest number."""
    if not found.numel():
        return 0.0
    difference, size = (found.double() - wanted.double()).abs().max(), wanted.double().abs().max()
    return float(difference / size) if size > 0 else float(difference)


def outcome_differences(found: Outcome, wanted: Outcome) -> tuple[float, float]:
    """Of the values, and the worst of all gradients."""
    names = [name for name in wanted.gradients if name in found.gradients]
    gradients = [tensor_difference(found.gradients[name], wanted.gradients[name]) for name in names]
    return value_difference(found.value, wanted.value), max(gradients)


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def rounded(step: Step) -> Step:
    """The same step in numbers that float32 holds, so that both sides read the same."""

    def single(numbers: list[float]) -> list[float]:
        return torch.tensor(numbers, dtype=torch.float64).float().tolist()

    names = ("now", "before", "sampler", "reference", "teacher", "entropy", "value", "new_value")

    def sample(one: Sample) -> Sample:
        return replace(one, advantage=single([one.advantage])[0], **{name: single(getattr(one, name)) for name in names})

    return step.map(sample)


FLOATS = ("value, float64", "gradient, float64", "value, float32", "gradient, float32")
FLOAT_BOUNDS = (1e-9, 1e-9, 2e-6, 2e-6)


def over_steps(
    strop: Callable[[Step], Outcome], peer: Callable[[Step], Outcome], steps: Sequence[Step], *, double_peer: bool = True
) -> Numbers:
    """The worst differences over several optimizer steps, with Strop in float64 and in float32.

    Args:
        strop, peer: A step's loss and gradients.
        double_peer: Whether the peer computes in float64 while Strop is in float32.
    """
    worst: list[float] = []
    for dtype in (torch.float64, torch.float32):
        pairs = []
        for step in [one if dtype == torch.float64 else rounded(one) for one in steps]:
            with default_type(dtype):
                found = strop(step)
            with default_type(torch.float64 if double_peer else dtype):
                pairs.append(outcome_differences(found, peer(step)))
        worst += [max(numbers) for numbers in zip(*pairs, strict=True)]
    assert all(map(math.isfinite, worst))
    return tuple(worst)
