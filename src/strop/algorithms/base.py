"""What an algorithm is: advantages, a loss and a group filter.

An algorithm is a frozen dataclass that is configuration and code at once. It sees types and tensors, never the loop, an
engine or a device. A new one is one file, named in a configuration as ``module:Class``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.metrics import Metrics
from strop.types import Batch, Group


@dataclass(frozen=True)
class TokenOutputs:
    """What the learner's network says of the N predicted tokens, under the distribution that sampled them."""

    logprobs: Tensor  # [N] float32, differentiable
    entropy: Tensor  # [N] float32, of the same distribution
    topk: Tensor | None = None


LossFn = Callable[[TokenOutputs, Batch], tuple[Tensor, Metrics]]


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """Advantages + loss + group filter.

    ``loss`` must divide by ``batch.totals`` only, never by the size of what it was handed: it is called once per
    micro-batch and the results are added up (law 1).
    """

    @property
    def requires(self) -> frozenset[str]:
        """Names of the [N] columns that must be scored before ``credit``, such as ``reference_logprobs``."""
        return frozenset()

    def keep(self, group: Group) -> bool:
        """False drops the group; its slot goes to a new task."""
        return True

    def trains(self, group: Group) -> Tensor:
        """Which rollouts count in the loss, [G] bool. The others give a baseline but are not divided by."""
        return torch.ones(len(group.rollouts), dtype=torch.bool)

    @abstractmethod
    def advantages(self, group: Group) -> Tensor:
        """Credit per rollout, [G]."""

    def credit(self, batch: Batch) -> Batch:
        """Per-token credit, when all required columns are there. By default each token has its rollout's advantage."""
        return batch

    def idle(self, batch: Batch, learner: str = "policy") -> Tensor:
        """Rollouts whose loss has exactly no gradient for ``learner``, [S] bool. They count in every total and metric, but are read
        without a backward pass: the gradient is the same, and two thirds of their cost are saved. None, unless an algorithm knows.
        """
        return torch.zeros(batch.num_sequences, dtype=torch.bool)

    @abstractmethod
    def loss(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        """The loss to be minimised, already divided by ``batch.totals``, and its metrics."""

    def losses(self) -> dict[str, LossFn]:
        """One loss per learner; most algorithms have just a policy."""
        return {"policy": self.loss}
