"""Where the models of a run live: in this process, or on the ranks of a cluster (``strop.assembly.remote``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from strop.algorithms.base import Algorithm
from strop.assembly.engines import Generation, GenerationNeeds, make_generation
from strop.assembly.roles import Policy, Speech, load_reward_policy, load_training_policy
from strop.assembly.scorers import make_learners, make_recorded_scorers, make_scorers
from strop.cluster.base import Cluster
from strop.config import RecordedRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.schema import RmRunConfig
from strop.sampling import Sampling
from strop.tracking.base import Tracker
from strop.training.base import ColumnSource, Learner
from strop.types import Group


class Home(Protocol):
    """Asked in this order: ``learners``, then scorers, while the policy is as it was before training; after a checkpoint ``generation``."""

    speech: Speech
    packed: bool  # whether the policy reads packed rows
    blocks: bool  # whether learners compute in this process, so that nothing else happens meanwhile
    shares_module: bool  # whether the generator runs the learner's own module

    async def learners(self, algorithm: Algorithm, sampling: Sampling, total_steps: int | None) -> dict[str, Learner]:
        """Who trains; ``total_steps`` are the optimizer steps of the run, None for no end. Raises ValueError."""
        ...

    async def scorers(self) -> dict[str, ColumnSource]:
        """Who fills the columns that the algorithm requires. Raises ValueError for a column that nobody fills."""
        ...

    async def recorded_scorers(self, groups: Callable[[], Sequence[Group]]) -> dict[str, ColumnSource]:
        """The same for a run on recorded data; ``groups()`` are all that will be read."""
        ...

    async def generation(self, needs: GenerationNeeds) -> Generation: ...


class LocalHome:
    """This process."""

    blocks = True

    def __init__(self, config: TrainingRunConfig, policy: Policy, tracker: Tracker) -> None:
        self.config = config
        self.policy = policy
        self.tracker = tracker
        self.speech: Speech = policy
        self.packed = policy.network.packed
        self.shares_module = config.policy.generation.backend in ("auto", "torch")

    async def learners(self, algorithm: Algorithm, sampling: Sampling, total_steps: int | None) -> dict[str, Learner]:
        self._algorithm, self._sampling = algorithm, sampling
        self._learners = make_learners(self.config, self.policy, algorithm, sampling, total_steps)
        return self._learners

    async def scorers(self) -> dict[str, ColumnSource]:
        assert isinstance(self.config, RolloutRunConfig)
        return make_scorers(self.config, self.policy, self._algorithm, self._sampling, self._learners)

    async def recorded_scorers(self, groups: Callable[[], Sequence[Group]]) -> dict[str, ColumnSource]:
        assert isinstance(self.config, RecordedRunConfig)
        return await make_recorded_scorers(self.config, self.policy, self._algorithm, self._sampling, groups, self.tracker)

    async def generation(self, needs: GenerationNeeds) -> Generation:
        return make_generation(self.policy, self.config.policy, needs)


async def make_home(config: TrainingRunConfig, cluster: Cluster | None, tracker: Tracker) -> Home:
    """With the policy loaded. Raises ModelNotFound, ValueError."""
    if cluster is None:
        policy = (
            load_reward_policy(config)
            if isinstance(config, RmRunConfig)
            else load_training_policy(config.policy, config.training.seed)
        )
        return LocalHome(config, policy, tracker)
    from strop.assembly.remote import make_cluster_home

    return await make_cluster_home(config, cluster, tracker)
