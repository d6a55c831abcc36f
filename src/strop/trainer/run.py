"""A training run: its components, its options and its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from strop.algorithms.base import Algorithm
from strop.checkpointing.base import Checkpointer, Restorable
from strop.learner.client import ColumnSources, LearnerClient
from strop.monitoring.rollout_store.rollout_record import DropReason
from strop.monitoring.trackers.base import SavedCheckpoint, Tracker
from strop.rollouts.stream import GroupStream, StreamState
from strop.stopping import EarlyStop, RunEnding, StopRequest
from strop.trainer.listeners import Listeners, StepTimer
from strop.types import Group
from strop.weight_sync.base import WeightSync


class Validator(Protocol):
    """Measures the policy between steps."""

    async def evaluate(self, step: int, tracker: Tracker) -> dict[str, float]:
        """Return metrics under ``validation/``."""
        ...


class TooManyDropped(RuntimeError):
    """Too many groups were dropped to continue the run. The message gives the reasons."""


class TooFewTasks(RuntimeError):
    """There were too few tasks to train a single step. The message says what happened to them."""


# When the loop waits for the groups in flight: before training, if learner and generator take turns on the same devices; before the new
# weights are published, if they run on separate devices; or never, so that weights change while groups are sampled.
DrainBefore = Literal["training", "publishing", "never"]


PAST_SELVES, DATA = "past_selves", "data"  # folders in a checkpoint


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of the training loop. Periods are in steps; 0 means never."""

    max_steps: int
    groups_per_step: int
    section: str = "grpo"  # section of the configuration, for messages that name its keys
    batch_key: str = "grpo.num_prompts_per_step"
    steps_per_batch: int = 1  # optimizer steps in one pass over a batch
    update_epochs: int = 1  # passes over a batch
    max_staleness: int = 0  # how many steps newer the trained policy may be than the one that started a rollout
    drop_stale: bool = False  # the stream's order does not wait for slow groups: older ones are dropped
    drain_before: DrainBefore = "never"
    max_groups_per_step: int = 1_000_000  # groups that may be generated to find enough that pass the filter
    max_errors_in_a_row: int = 16
    min_rollouts: int = 2  # of a group that others were left out of
    val_period: int = 0
    val_start_at: int = -1  # no periodic validation before this step
    val_at_start: bool = False
    val_at_end: bool = False
    save_period: int = 0
    share_prefixes: bool = True
    tasks_per_epoch: int | None = None  # for the metric train/epoch; None: unknown

    def count_optimizer_steps(self, tasks: int | None) -> int | None:
        """Return the largest number of optimizer steps of a run; None if neither its steps nor its ``tasks`` are limited."""
        limits = [self.max_steps] if self.max_steps < 1_000_000 else []
        limits += [] if tasks is None else [tasks // self.groups_per_step]
        return min(limits) * self.steps_per_batch * self.update_epochs if limits else None


@dataclass(frozen=True, kw_only=True)
class GroupSupply:
    """The source of a run's groups while it runs."""

    stream: GroupStream
    weights: WeightSync  # of what generates
    evaluator: Validator | None


@dataclass
class Saved:
    """The newest checkpoint."""

    step: int = -1
    failed: bool = False  # the last save failed, so the next step saves again
    unannounced: SavedCheckpoint | None = None  # until it has been reported to the trackers


@dataclass
class Collected:
    """What the current step did to collect its groups."""

    stream: StreamState | None = None  # state at the beginning of the step
    dropped: list[tuple[Group, DropReason]] = field(default_factory=list)  # with the reason
    errors_in_a_row: int = 0  # failed groups in a row, across steps
    last_errors: tuple[str, ...] = ()  # of the last failed group


@dataclass(kw_only=True)
class TrainingRun:
    """The components and the state of a training run. ``step`` counts trained batches and is also the version of the weights."""

    options: TrainOptions
    algorithm: Algorithm
    stream: GroupStream
    learners: Mapping[str, LearnerClient]
    parts: Mapping[str, Restorable] = field(default_factory=dict)  # other components whose state is saved, by name
    columns: ColumnSources
    weights: WeightSync
    tracker: Tracker
    evaluator: Validator | None = None
    early_stop: EarlyStop | None = None
    stop_request: StopRequest = field(default_factory=StopRequest)
    checkpoints: Checkpointer | None = None
    listeners: Listeners = field(default_factory=Listeners)
    step: int = 0
    ending: RunEnding | None = None  # None: the run goes on
    saved: Saved = field(default_factory=Saved)
    last_metrics: Mapping[str, float] = field(default_factory=dict)  # metrics of the last step
    timer: StepTimer = field(default_factory=StepTimer)  # of the current step
    collected: Collected = field(default_factory=Collected)

    @property
    def saved_parts(self) -> Mapping[str, Restorable]:
        """What a checkpoint holds in addition to the state of the run, by name."""
        return {**self.learners, **self.parts}

    @property
    def collecting(self) -> str:
        """What the run does while it waits for groups."""
        return "reading data" if self.algorithm.recorded_data else "generating"

    def begin_step(self) -> None:
        self.timer.start_step()
        self.collected.stream = self.stream.state()
        self.collected.dropped.clear()
