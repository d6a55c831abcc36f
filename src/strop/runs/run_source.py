"""Where the groups of a run come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

from strop.algorithms.base import Algorithm
from strop.checkpointing.base import Restorable, RunState
from strop.distributed.base import Cluster
from strop.distributed.workers.learner_worker import RankColumns
from strop.environments.handle import EnvironmentHandle
from strop.learner.client import AsyncColumnSource, ColumnSources, LearnerClient
from strop.learner.torch.scorer import NetworkScorer
from strop.monitoring.trackers.base import Tracker
from strop.runs.backend import Backend
from strop.runs.models import LoadedPolicy
from strop.sampling import Sampling
from strop.trainer.run import GroupSupply, TrainOptions


class RunSource(ABC):
    """The data of a run: ``read`` first, ``prepare`` once the policy is loaded; then ``make_columns``, ``make_parts`` and ``open``."""

    options: TrainOptions  # of the loop, once it is prepared

    @classmethod
    @abstractmethod
    def read(cls, config: Any, algorithm: Algorithm, tracker: Tracker, cluster: Cluster | None) -> Self:
        """Read the data. Raises DataError, ConfigError, EnvironmentConfigError."""
        ...

    @classmethod
    def make_rank_columns(
        cls, config: Any, policy: LoadedPolicy, algorithm: Algorithm, sampling: Sampling, device: str, world: int
    ) -> Mapping[tuple[str, str], tuple[RankColumns, NetworkScorer]]:
        """Make sources of columns on one of ``world`` ranks of the torch learner, by the names of model and column, each with the scorer
        of its network. ``make_columns`` calls them through ``RayBackend.caller``. Raises ValueError.
        """
        return {}

    @property
    @abstractmethod
    def environments(self) -> Sequence[EnvironmentHandle[Any]]: ...

    @property
    @abstractmethod
    def sampling(self) -> Sampling:
        """How the policy is sampled, which is the distribution that learners and scorers read."""
        ...

    @property
    @abstractmethod
    def size(self) -> int | None:
        """Number of groups over all epochs; None if there is no end, or it is not known."""
        ...

    @abstractmethod
    def prepare(self, backend: Backend) -> TrainOptions:
        """Return the options of the loop."""
        ...

    async def make_columns(self, backend: Backend) -> Mapping[str, AsyncColumnSource]:
        """Make the sources of ``TrainingRunConfig.filled_columns``, before a checkpoint is loaded. Raises ValueError."""
        return {}

    @abstractmethod
    def make_parts(self, backend: Backend) -> Mapping[str, Restorable]:
        """Return what a checkpoint stores of the data."""
        ...

    @abstractmethod
    def open(
        self, backend: Backend, policy: LearnerClient, columns: ColumnSources, state: RunState | None
    ) -> AbstractAsyncContextManager[GroupSupply]:
        """Supply groups inside the context, from where ``state`` left off."""
        ...
