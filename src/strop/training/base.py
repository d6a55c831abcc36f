"""The seam to trainers: score, forward_backward, step, weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from strop.algorithms.base import LossFn
from strop.metrics import Metrics
from strop.types import Batch


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """What a network says of a batch's N predicted tokens, without gradients."""

    logprobs: Tensor  # [N] float32, under the distribution that sampled
    entropy: Tensor  # [N] float32, nats


@dataclass(frozen=True, kw_only=True, eq=False)
class BackwardResult:
    """The outcome of one accumulated gradient."""

    metrics: Metrics
    scores: Scores  # of the weights the gradient was taken at


class WeightSource(Protocol):
    """Weights under canonical (Hugging Face) names."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class Scorer(Protocol):
    """Something that fills a batch column: a frozen reference, a teacher, the learner itself."""

    async def score(self, batch: Batch) -> Scores: ...


class Learner(Scorer, Protocol):
    """The trainer. Gradients accumulate over ``forward_backward`` calls until ``step``."""

    async def forward_backward(self, batch: Batch, loss: LossFn) -> BackwardResult:
        """Cut the batch into micro-batches by token budget and accumulate the gradient of the summed loss."""
        ...

    async def step(self) -> Metrics:
        """Clip, take one optimizer step, advance the schedule, zero the gradients."""
        ...

    def weights(self) -> WeightSource: ...

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        """Write weights, and the optimizer and its schedule, under ``folder``."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote, in place: whoever shares the weights sees them."""
        ...
