"""What a learner is to a run: an entry point of ``strop.learners`` names a class of this protocol, and ``LearnerSection.backend`` it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from strop import plugins
from strop.learner.learner_config import LearnerSection, WithLearner
from strop.models.rank_shards import RankShardReader
from strop.problems import Problem

if TYPE_CHECKING:  # without torch, for dry runs
    from strop.algorithms.base import Algorithm
    from strop.config import TrainingRunConfig
    from strop.distributed.workers.learner_worker import RankModels, RankPolicy
    from strop.sampling import Sampling


class LearnerDims(Protocol):
    """The parallel dimensions of a model on the ranks of its learner; ``str`` describes them."""

    @property
    def data(self) -> int:
        """The number of ranks, or groups of ranks, that read different parts of a batch."""
        ...

    @property
    def world_size(self) -> int: ...


class LearnerBackend(RankShardReader, Protocol):
    """Builds the models of a run on ranks. Methods may be sent to other processes: an instance has no state."""

    def load_policy(self, config: TrainingRunConfig) -> RankPolicy:
        """Load the policy, as far as it is needed before the models are built. Raises ModelNotFound, ValueError."""
        ...

    def build_models(
        self,
        config: TrainingRunConfig,
        algorithm: Algorithm,
        sampling: Sampling,
        total_steps: int | None,
        policy: Any,
        device: str,
        world: int,
        /,
    ) -> RankModels:
        """Build the models of a run, divided over ``world`` ranks. Raises ValueError for what cannot be divided so."""
        ...

    def write_model_folder(self, policy: Any, config: TrainingRunConfig, folder: Path) -> None:
        """Write what engines build the policy from, and next to it (``draft``) the head that they draft with if it is sent."""
        ...

    def make_dims(self, section: Any, world: int) -> LearnerDims:
        """Return the dimensions of a model on ``world`` ranks. Raises ValueError if its section's sizes do not divide them."""
        ...

    def examine(self, config: TrainingRunConfig, key: str, model: Any, values: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield why a model or teacher, at ``key``, cannot be trained as configured. ``values``: of its config.json."""
        ...


def load_backend(learner: LearnerSection) -> LearnerBackend:
    """Import the learner of a section. Raises UserCodeError."""
    backend: LearnerBackend = plugins.load("learners", learner.backend)()
    return backend


def choose_dims(model: WithLearner, world: int) -> LearnerDims:
    """Return the parallel dimensions of a model on ``world`` ranks of its learner. Raises ValueError."""
    return load_backend(model.learner).make_dims(model.learner, world)
