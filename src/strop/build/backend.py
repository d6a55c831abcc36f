"""The backend that holds the models of a run: this process, or the ranks of a cluster (``strop.build.cluster.ray_backend``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from strop.algorithms.base import Algorithm
from strop.build.engines import GeneratorSpec, SyncedGenerator, make_generator
from strop.build.models import LoadedPolicy, TokenizerBundle, load_reward_policy, load_training_policy
from strop.build.scorers import make_learners, make_recorded_scorers, make_scorers
from strop.config import RecordedRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.schema.run_config import RmRunConfig
from strop.distributed.base import Cluster
from strop.learner.client import AsyncColumnSource, Caller, InlineCaller, LearnerClient, ThreadCaller
from strop.learner.learner_thread import LearnerThread
from strop.monitoring.trackers.base import Tracker
from strop.sampling import Sampling
from strop.types import Group


class Backend(Protocol):
    """Builds the models of a run.

    Call ``build_learners`` first, then ``build_scorers``, before a checkpoint is loaded: they copy the policy as it is before training.
    Call ``build_generator`` last, after the checkpoint is loaded."""

    bundle: TokenizerBundle
    packed: bool  # whether the policy supports packed rows

    async def build_learners(self, algorithm: Algorithm, sampling: Sampling, total_steps: int | None) -> dict[str, LearnerClient]:
        """Build the learners by name. ``total_steps``: optimizer steps of the run; None: no limit. Raises ValueError."""
        ...

    async def build_scorers(self) -> dict[str, AsyncColumnSource]:
        """Build the sources of the columns that the algorithm requires. Raises ValueError for a column without a source."""
        ...

    async def build_recorded_scorers(self, groups: Callable[[], Sequence[Group]]) -> dict[str, AsyncColumnSource]:
        """Build the sources for a run on recorded data. ``groups()`` returns every group that the run will read."""
        ...

    async def build_generator(self, spec: GeneratorSpec) -> SyncedGenerator:
        """Build the generator and its weight sync. Raises ValueError."""
        ...


class LocalBackend:
    """Builds models in this process. They compute in a thread if training overlaps with generation in other processes."""

    def __init__(self, config: TrainingRunConfig, policy: LoadedPolicy, tracker: Tracker) -> None:
        self.config = config
        self.policy = policy
        self.tracker = tracker
        self.bundle: TokenizerBundle = policy
        self.packed = policy.network.packed
        self.make_caller: Callable[[Any], Caller] = InlineCaller
        if generates_meanwhile(config):
            self.make_caller = partial(ThreadCaller, thread=LearnerThread())

    async def build_learners(self, algorithm: Algorithm, sampling: Sampling, total_steps: int | None) -> dict[str, LearnerClient]:
        self._algorithm, self._sampling = algorithm, sampling
        self._learners = make_learners(self.config, self.policy, algorithm, sampling, total_steps)
        return {name: LearnerClient(self.make_caller(learner)) for name, learner in self._learners.items()}

    async def build_scorers(self) -> dict[str, AsyncColumnSource]:
        assert isinstance(self.config, RolloutRunConfig)
        return make_scorers(self.config, self.policy, self._algorithm, self._sampling, self._learners, self.make_caller)

    async def build_recorded_scorers(self, groups: Callable[[], Sequence[Group]]) -> dict[str, AsyncColumnSource]:
        assert isinstance(self.config, RecordedRunConfig)
        return await make_recorded_scorers(self.config, self.policy, self._algorithm, self._sampling, groups, self.tracker)

    async def build_generator(self, spec: GeneratorSpec) -> SyncedGenerator:
        return make_generator(self.policy, self.config.policy, spec)


def generates_meanwhile(config: TrainingRunConfig) -> bool:
    """Return whether engines in other processes generate while the learner trains. The torch engine takes turns with it instead."""
    return (
        isinstance(config, RolloutRunConfig)
        and config.rollout_training.max_staleness > 0
        and config.policy.generation.backend not in ("auto", "torch")
    )


async def make_backend(config: TrainingRunConfig, cluster: Cluster | None, tracker: Tracker) -> Backend:
    """Make the backend of a run and load the policy. Raises ModelNotFound, ValueError."""
    if cluster is None:
        policy = (
            load_reward_policy(config)
            if isinstance(config, RmRunConfig)
            else load_training_policy(config.policy, config.training.seed)
        )
        return LocalBackend(config, policy, tracker)
    from strop.build.cluster.ray_backend import make_ray_backend

    return await make_ray_backend(config, cluster, tracker)
