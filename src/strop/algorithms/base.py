"""What an algorithm is: credit, a loss for each learner and a group filter.

An algorithm is a frozen dataclass that is configuration and code at once. It sees types and tensors, never the loop, an
engine or a device. A new one is one file: in this package, where its name is the file's, or anywhere else as ``module:Class``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from strop.metrics import Metrics
from strop.types import Batch, Group


@dataclass(frozen=True)
class TokenOutputs:
    """What a language model says of the N predicted tokens, under the distribution that sampled them."""

    logprobs: Tensor  # [N] float32, differentiable
    entropy: Tensor  # [N] float32, of the same distribution, differentiable
    candidates: Tensor | None = None  # [N, K] log-probabilities of the tokens in the batch's column CANDIDATES, differentiable


@dataclass(frozen=True)
class ValueOutputs:
    """What a network with a scalar head says at the N places a batch asks about: a critic's values, a reward model's scores."""

    values: Tensor  # [N] float32, differentiable


Outputs = TokenOutputs | ValueOutputs
LossFn = Callable[[Any, Batch], tuple[Tensor, Metrics]]  # (what the learner's network puts out, batch) -> (loss, metrics)

CANDIDATES = "candidates"  # a batch column, [N, K] int64: token ids whose log-probabilities a loss wants besides the target's


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will do with an algorithm, as far as it decides whether the two fit together."""

    group_size: int = 1
    optimizer_steps: int = 1  # from one batch
    max_staleness: int = 0
    environment_rewards: tuple[str, ...] = ()  # names, if they are known


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """Credit + losses + group filter.

    A loss must divide by ``batch.totals`` only, never by the size of what it was handed: it is called once per
    micro-batch and the results are added up (law 1). What depends on the whole optimizer step belongs in ``survey``.
    """

    # What kind of recorded data it learns from, where nothing is sampled; empty for rollouts.
    recorded: ClassVar[Literal["", "conversations", "preferences", "judgements"]] = ""
    whole_groups: ClassVar[bool] = False  # its loss compares the rollouts of a group: a micro-batch never cuts one
    places: ClassVar[Literal["tokens", "ends"]] = (
        "tokens"  # a batch asks about every sampled token, or about the end of each rollout
    )

    @property
    def requires(self) -> frozenset[str]:
        """Names of the columns that must be filled in before ``credit``, such as ``reference_logprobs``."""
        return frozenset()

    @property
    def greedy_baseline(self) -> bool:
        """Whether each group needs one more rollout, sampled greedily and not trained on (``Group.baseline``)."""
        return False

    @property
    def surveys(self) -> bool:
        """Whether ``survey`` needs the outputs of the whole optimizer step: one more forward pass for each step."""
        return False

    def problems(self, plan: Plan) -> Iterator[str]:
        """Why this algorithm, as it is set, makes no sense in such a run: what was found, and what to set instead."""
        return iter(())

    def keep(self, group: Group) -> bool:
        """False drops the group; its slot goes to a new task."""
        return True

    def trains(self, group: Group) -> Tensor:
        """Which rollouts count in the loss, [G] bool. The others give a baseline but are not divided by."""
        return torch.ones(len(group.rollouts), dtype=torch.bool)

    def rewards(self, group: Group) -> Tensor:
        """Rewards as the algorithm sees them, [G] float64; shaped ones, for instance."""
        return group.rewards

    @abstractmethod
    def advantages(self, group: Group) -> Tensor:
        """Credit per rollout, [G]."""

    def credit(self, batch: Batch) -> Batch:
        """Per-token credit of the whole batch, when all required columns are there. By default each token has its rollout's advantage."""
        return batch

    def report(self, batch: Batch) -> dict[str, float]:
        """What there is to log about a batch with its credit."""
        return {}

    def survey(self, batch: Batch, outputs: TokenOutputs | None) -> Batch:
        """Columns that depend on everything one optimizer step sees, added before the step is cut into micro-batches.

        ``outputs`` are those of the weights this step starts from, without gradient; None unless ``surveys``.
        """
        return batch

    def idle(self, batch: Batch, learner: str = "policy") -> Tensor:
        """Rollouts whose loss has exactly no gradient for ``learner``, [S] bool. They count in every total and metric, but are read
        without a backward pass: the gradient is the same, and two thirds of their cost are saved. None, unless an algorithm knows.
        """
        return torch.zeros(batch.num_sequences, dtype=torch.bool)

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> tuple[Tensor, Metrics]:
        """The loss to be minimised, already divided by ``batch.totals``, and its metrics."""

    def losses(self, step: int) -> dict[str, LossFn]:
        """One loss for each learner that trains in the step numbered ``step`` (from 0); most algorithms have just a policy."""
        return {"policy": self.loss}
