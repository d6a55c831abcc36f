"""A training run: its components, its options and its state."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from strop.algorithms.base import Algorithm
from strop.checkpointing.base import Checkpointer, Restorable
from strop.learner.client import LearnerClient
from strop.learner.throughput import Throughput
from strop.ledger.token_trace import TokenTrace
from strop.monitoring.hacking.hacking_monitor import HackingMonitor
from strop.monitoring.profiling.step_profiler import StepProfiler
from strop.monitoring.rollout_store.rollout_record import DropReason
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.base import Tracker
from strop.monitoring.trackers.media import SavedCheckpoint
from strop.rollouts.stream import GroupStream, StreamState
from strop.stopping import EarlyStop, RunEnding, StopRequest
from strop.trainer.column_sources import ColumnSources
from strop.trainer.evaluation import Validator
from strop.trainer.health.health_monitor import HealthMonitor
from strop.trainer.mismatch import MismatchGuard
from strop.trainer.step_timer import StepTimer
from strop.types import Batch, Group
from strop.weight_sync.base import WeightSync


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
    val_period: int = 0
    val_start_at: int = -1  # no periodic validation before this step
    val_at_start: bool = False
    val_at_end: bool = False
    save_period: int = 0
    share_prefixes: bool = True
    tracked_samples: int | None = None  # rollouts of a step that services show; None: there is no service
    tracked_samples_period: int = 10
    tasks_per_epoch: int | None = None  # for the metric train/epoch; None: unknown
    stored_routes: bool = False  # store the experts of each token with the rollouts
    token_columns: bool = False  # store what the update says of each token, also of recorded data


@dataclass(kw_only=True)
class TrainingRun:
    """The components and the state of a training run. ``step`` counts trained batches and is also the version of the weights."""

    options: TrainOptions
    algorithm: Algorithm
    stream: GroupStream
    learners: Mapping[str, LearnerClient]
    parts: Mapping[str, Restorable] = field(default_factory=dict)  # what else has a state that is saved, by name
    columns: ColumnSources
    weights: WeightSync
    tracker: Tracker
    rollouts: RolloutStore
    decode: Callable[[list[int]], str] | None = None  # the tokenizer's, for stored prompts
    evaluator: Validator | None = None
    early_stop: EarlyStop | None = None
    stop_request: StopRequest = field(default_factory=StopRequest)
    mismatch: MismatchGuard = field(default_factory=MismatchGuard)
    health: HealthMonitor = field(default_factory=HealthMonitor)
    monitor: HackingMonitor = field(default_factory=HackingMonitor)
    checkpoints: Checkpointer | None = None
    throughput: Throughput | None = None  # how fast training is for the devices it has
    read_machines: Callable[[], Mapping[str, float]] = dict  # what the machines did since it was last called
    on_close: list[Callable[[], Awaitable[None]]] = field(default_factory=list)  # called when the run has ended
    step: int = 0
    ending: RunEnding | None = None  # None: there is a further step
    stop_noted: bool = False  # the stop request has been logged
    saved_step: int = -1  # the step of the newest checkpoint
    unannounced: SavedCheckpoint | None = None  # the newest checkpoint, until the trackers know of it
    save_failed: bool = False  # the last save did: the next step is saved
    last_metrics: Mapping[str, float] = field(default_factory=dict)  # metrics of the last step
    timer: StepTimer = field(default_factory=StepTimer)  # of the current step
    profiler: StepProfiler = field(default_factory=StepProfiler)
    stream_state: StreamState | None = None  # at the beginning of the current step
    dropped: list[tuple[Group, DropReason]] = field(default_factory=list)  # dropped in the current step, with the reason
    errors_in_a_row: int = 0  # groups, also of earlier steps

    @property
    def saved_parts(self) -> Mapping[str, Restorable]:
        """What a checkpoint holds beside the state of the run, by name."""
        return {**self.learners, **self.parts}

    @property
    def collecting(self) -> str:
        """What the run does while it waits for groups."""
        return "reading data" if self.algorithm.recorded_data else "generating"

    def trace_tokens(self, batch: Batch, optimizer_steps: int) -> TokenTrace:
        """Return what follows the tokens of a batch through its update, if their columns are stored."""
        return TokenTrace(
            algorithm=self.algorithm,
            batch=batch,
            optimizer_steps=optimizer_steps,
            note=self.tracker.note,
            active=self.options.token_columns,
        )

    def begin_step(self) -> None:
        self.timer.start_step()
        self.stream_state = self.stream.state()
        self.dropped.clear()
