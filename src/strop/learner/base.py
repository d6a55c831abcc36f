"""Interfaces of learners, scorers and sources of batch columns. They are synchronous; ``strop.learner.client`` makes them awaitable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from strop.algorithms.base import LossFn, Outputs, TokenOutputs
from strop.metrics import Metrics
from strop.types import Batch, Group


@dataclass(frozen=True, kw_only=True, eq=False)
class BackwardResult:
    """Metrics and outputs of one pass over a batch."""

    metrics: Metrics
    outputs: Outputs  # for the whole batch, detached, under the weights of this pass


class WeightSource(Protocol):
    """Named weights, under Hugging Face names."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class Scorer(Protocol):
    """A network that scores a batch without gradients: a frozen reference, a teacher, a learner."""

    def score(self, batch: Batch) -> Outputs: ...


class ColumnSource(Protocol):
    """Computes columns that an algorithm requires."""

    def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        """Return columns by name, [N] or [N, K]. ``batch`` was packed from ``groups``."""
        ...


class Learner(Scorer, Protocol):
    """Trains a network. Gradients accumulate over ``forward_backward`` calls until ``step``."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> BackwardResult:
        """Split the batch into micro-batches by token budget and accumulate the gradient of the summed loss."""
        ...

    def evaluate_loss(self, batch: Batch, loss: LossFn) -> BackwardResult:
        """Compute the same loss and metrics without a gradient, for validation."""
        ...

    def step(self) -> Metrics:
        """Clip the gradients, take one optimizer step, advance the schedule and zero the gradients."""
        ...

    def weights(self) -> WeightSource: ...

    def save(self, folder: Path, optimizer: bool = True) -> None:
        """Write the weights, and the state of the optimizer and its schedule, under ``folder``."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote, in place: everything that shares the weights sees the restored ones."""
        ...


def require_token_outputs(outputs: Outputs) -> TokenOutputs:
    """Return ``outputs`` if they are those of a language model. Raises TypeError for outputs of a network with a scalar head."""
    if not isinstance(outputs, TokenOutputs):
        raise TypeError(f"log-probabilities were requested from a network that returns {type(outputs).__name__}")
    return outputs
