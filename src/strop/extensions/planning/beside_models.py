"""Models alongside the policy: a critic, which learns, and teachers, which only score. Each has its own size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from strop.extensions.planning.learner_memory import LearnerFootprint, LearnerSetup
from strop.extensions.planning.model_size import ModelSize


@dataclass(frozen=True, kw_only=True)
class BesideModel:
    """A model on the learner's devices, or of ``hosts`` processes with their own devices."""

    name: str  # critic, teacher, teachers.NAME
    model: ModelSize
    setup: LearnerSetup
    learns: bool = False
    offloaded: bool = False  # it is in CPU memory between uses
    shares_weights: bool = False  # with the policy
    hosts: int = 0  # processes that each have the whole model; 0: the learner's ranks share it

    @cached_property
    def footprint(self) -> LearnerFootprint:
        return LearnerFootprint(self.model, self.setup)

    @property
    def weights(self) -> float:
        """Bytes of its weights on a rank, with what its optimizer keeps if it learns."""
        if self.shares_weights:
            return 0.0
        if self.learns:
            return self.footprint.weights + self.footprint.optimizer
        return self.setup.weight_bytes * self.footprint.rank_weights

    @property
    def held(self) -> float:
        """Bytes that stay on a learner's device between its uses."""
        return 0.0 if self.offloaded or self.hosts or self.setup.offloads_weights else self.weights

    @property
    def kept_away(self) -> float:
        """Bytes in a node's CPU memory between its uses, for a rank."""
        return self.weights if (self.offloaded or self.setup.offloads_weights) and not self.hosts else 0.0

    @property
    def scoring(self) -> float:
        """Bytes of a pass without gradients, besides what is held."""
        arrives = self.weights if self.offloaded and not self.hosts else 0.0
        frozen = (
            not self.learns and self.setup.weight_bytes == self.setup.compute_bytes
        )  # its weights are multiplied with as they are
        copies = self.footprint.weight_copies if frozen else 0.0
        return arrives + self.footprint.scoring_peak - self.footprint.static - copies

    @property
    def training(self) -> Mapping[str, float]:
        """Bytes of its training, besides weights and optimizer. A critic has one number for a token, and no output layer."""
        found = self.footprint
        return {
            f"gradients of the {self.name}": found.gradients,
            f"activations of the {self.name}": found.activations + found.layer_backward,
            f"weight copies of the {self.name}": found.weight_copies + found.gathered,
        }


def without_output(model: ModelSize) -> ModelSize:
    """Return a model whose output is a number: it has no separate output layer."""
    return replace(model, dimensions=replace(model.dimensions, tied=True))
