"""A run as it was before a step, in this process and without engines, environments and anything that it writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from strop import plugins
from strop.algorithms.base import Algorithm
from strop.config import RecordedRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.determinism import set_deterministic
from strop.extensions.replay.original_machine import find_start, use_threads
from strop.extensions.replay.replay_plan import ReplayError
from strop.extensions.replay.stored_groups import LearnerReads, StoredStep, rebuild_groups
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.base import NullTracker, Tracker
from strop.rollouts.stream import RolloutStream
from strop.runs.backend import make_backend
from strop.runs.lifecycle import make_checkpoints, seed_everything
from strop.runs.recorded_run import RecordedSource, make_recorded_stream, read_examples
from strop.runs.resume.token_budgets import make_token_budgets, settle_token_budgets
from strop.runs.rollout_run import SampledSource
from strop.runs.scorers import make_columns
from strop.runs.tasks import make_training_tasks
from strop.trainer.run import TrainingRun
from strop.trainer.train import collect
from strop.types import Group
from strop.weight_sync.in_process import InProcessWeights


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The weights, and what belongs to them, that a run is opened with."""

    step: int  # after which
    checkpoint: Path | None  # None: the initial model
    last_metrics: Mapping[str, float]  # of that step


@dataclass(frozen=True, kw_only=True)
class ReplayedRun:
    """A run as it was before a step, ready to train on what it trained on."""

    folder: Path  # the log folder
    run: TrainingRun
    config: TrainingRunConfig

    async def read_step(self) -> StoredStep:
        """Return what the next step trains on, and compute with its threads from here on. Raises ReplayError, FileNotFoundError."""
        use_threads(find_start(self.folder, self.run.step + 1), self.config)
        if isinstance(self.config, RolloutRunConfig):
            return read_stored(self.folder, self.run.step + 1, self.config, self.run.algorithm)
        groups = await collect(self.run)
        return StoredStep(tuple(groups), tuple(self.run.collected.dropped))


@asynccontextmanager
async def open_replayed_run(
    folder: Path, beginning: Beginning, config: TrainingRunConfig, algorithm: Algorithm
) -> AsyncIterator[ReplayedRun]:
    """Build the run in a log folder as it was after a step. Raises ReplayError, CheckpointError, ModelNotFound."""
    seed_everything(config.training.seed)
    set_deterministic(config.policy.deterministic)
    tracker = NullTracker()
    source = _read_training_data(config, algorithm, tracker)
    backend = await make_backend(config, None, tracker)
    options = source.prepare(backend)
    learners = await backend.build_learners(algorithm, source.sampling, options.count_optimizer_steps(source.size))
    columns = await make_columns(
        config, backend, algorithm, learners, tracker, source.read_all, last_metrics=lambda: run.last_metrics
    )
    parts = {**make_token_budgets(config), **({} if isinstance(source, SampledSource) else source.make_parts(backend))}
    state = None
    if beginning.checkpoint is not None:
        checkpoints = replace(make_checkpoints(config, backend.bundle.save), folder=beginning.checkpoint.parent)
        state = checkpoints.load(beginning.checkpoint, {**learners, **parts})
    await settle_token_budgets(config, learners, parts, tracker)
    if isinstance(source, SampledSource):
        stream = RolloutStream(_refuse_to_sample, slots=0, size=0)
    else:
        stream = make_recorded_stream(source.examples, options, None if state is None else state.stream)
    run = TrainingRun(
        options=options,
        algorithm=algorithm,
        stream=stream,
        learners=learners,
        parts=parts,
        columns=columns,
        weights=InProcessWeights([]),
        tracker=tracker,
        step=beginning.step,
        last_metrics=beginning.last_metrics,
    )
    try:
        yield ReplayedRun(folder=folder, run=run, config=config)
    finally:
        await stream.close()


def _read_training_data(config: TrainingRunConfig, algorithm: Algorithm, tracker: Tracker) -> SampledSource | RecordedSource:
    if isinstance(config, RolloutRunConfig):
        return SampledSource(config=config, algorithm=algorithm, tracker=tracker, train=make_training_tasks(config))
    assert isinstance(config, RecordedRunConfig)
    train = read_examples(config, config.data.train, "train", algorithm)
    return RecordedSource(config=config, algorithm=algorithm, tracker=tracker, train=train)


async def _refuse_to_sample(index: int) -> Group:
    raise ReplayError("a replay samples no rollouts")


def read_stored(folder: Path, step: int, config: RolloutRunConfig, algorithm: Algorithm) -> StoredStep:
    """Return what a step trained on from its stored rollouts. Raises ReplayError, FileNotFoundError."""
    store = RolloutStore(folder, "none")
    return rebuild_groups(store.read(step, ledger=False), find_reads(config, algorithm), store.images)


def find_reads(config: RolloutRunConfig, algorithm: Algorithm) -> LearnerReads:
    """Return what the learner of a run reads besides tokens."""
    return LearnerReads(
        columns=tuple(column for column in plugins.load_all("columns") if column.is_on(config)),
        baseline=algorithm.greedy_baseline,
    )
