"""The seam to trainers: score, forward_backward, step, weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from strop.algorithms.base import LossFn, Outputs, TokenOutputs, ValueOutputs
from strop.metrics import Metrics
from strop.types import Batch, Group


@dataclass(frozen=True, kw_only=True, eq=False)
class BackwardResult:
    """The outcome of one accumulated gradient."""

    metrics: Metrics
    outputs: Outputs  # of the whole batch, without gradient, by the weights the gradient was taken at


class WeightSource(Protocol):
    """Weights under canonical (Hugging Face) names."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class Scorer(Protocol):
    """A network that reads a batch without gradients: a frozen reference, a teacher, a learner."""

    async def score(self, batch: Batch) -> Outputs: ...


class ColumnSource(Protocol):
    """Whoever fills a column that an algorithm requires."""

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        """Columns by name, [N] or [N, K]; ``groups`` are those the batch was packed from."""
        ...


@dataclass(frozen=True)
class LogprobColumn:
    """The log-probabilities a network gives the sampled tokens, as the column ``name``."""

    name: str
    scorer: Scorer

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        return {self.name: token_outputs(await self.scorer.score(batch)).logprobs}


@dataclass(frozen=True)
class ValueColumn:
    """What a critic expects at each sampled token, as the column ``name``."""

    name: str
    scorer: Scorer

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        outputs = await self.scorer.score(batch)
        if not isinstance(outputs, ValueOutputs):
            raise TypeError(f"{type(self.scorer).__name__} is no critic: it gives {type(outputs).__name__}")
        return {self.name: outputs.values}


def token_outputs(outputs: Outputs) -> TokenOutputs:
    """Outputs of a language model. Raises TypeError for those of a network with a scalar head."""
    if not isinstance(outputs, TokenOutputs):
        raise TypeError(f"log-probabilities were asked of a network that gives {type(outputs).__name__}")
    return outputs


class Learner(Scorer, Protocol):
    """The trainer. Gradients accumulate over ``forward_backward`` calls until ``step``."""

    async def forward_backward(self, batch: Batch, loss: LossFn) -> BackwardResult:
        """Cut the batch into micro-batches by token budget and accumulate the gradient of the summed loss."""
        ...

    async def measure(self, batch: Batch, loss: LossFn) -> BackwardResult:
        """The same loss and metrics, without a gradient: for validation."""
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
