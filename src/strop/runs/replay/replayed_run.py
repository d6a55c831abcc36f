"""A run as it was before a step, in this process and without engines, environments and anything that it writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from strop.algorithms.base import Algorithm
from strop.checkpointing.base import Restorable, RunState
from strop.config import RecordedRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.data.data_state import DataState
from strop.determinism import set_deterministic
from strop.learner.client import LearnerClient
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.base import NullTracker, Tracker
from strop.rollouts.stream import RolloutStream
from strop.runs.backend import make_backend
from strop.runs.lifecycle import make_checkpoints, seed_everything
from strop.runs.models import TokenizerBundle
from strop.runs.recorded_run import join_examples, make_recorded_options, make_recorded_stream, read_examples
from strop.runs.replay.original_machine import find_start, use_threads
from strop.runs.replay.replay_error import ReplayError
from strop.runs.replay.stored_groups import LearnerReads, StoredStep, rebuild_groups
from strop.runs.resume.token_budgets import make_token_budgets, settle_token_budgets
from strop.runs.rollout_run import make_train_options
from strop.runs.scorers import count_optimizer_steps, make_scorers
from strop.runs.tasks import make_training_tasks
from strop.sampling import Sampling
from strop.trainer.column_sources import ColumnSources
from strop.trainer.run import DATA, TrainingRun, TrainOptions
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
    if isinstance(config, RolloutRunConfig):
        run = await _build_rollouts(beginning, config, algorithm, tracker)
    else:
        assert isinstance(config, RecordedRunConfig)
        run = await _build_recorded(beginning, config, algorithm, tracker)
    try:
        yield ReplayedRun(folder=folder, run=run, config=config)
    finally:
        await run.stream.close()


def read_stored(folder: Path, step: int, config: RolloutRunConfig, algorithm: Algorithm) -> StoredStep:
    """Return what a step trained on from its stored rollouts. Raises ReplayError, FileNotFoundError."""
    store = RolloutStore(folder, "none")
    return rebuild_groups(store.read(step, ledger=False), find_reads(config, algorithm), store.images)


def find_reads(config: RolloutRunConfig, algorithm: Algorithm) -> LearnerReads:
    """Return what the learner of a run reads besides tokens."""
    sampling = Sampling(**config.policy.generation.sampling_options())
    return LearnerReads(
        routes=config.policy.router_replay.enabled,
        kept_tokens=sampling.records_sampling_mask,
        baseline=algorithm.greedy_baseline,
    )


async def _build_rollouts(beginning: Beginning, config: RolloutRunConfig, algorithm: Algorithm, tracker: Tracker) -> TrainingRun:
    tasks = make_training_tasks(config)
    backend = await make_backend(config, None, tracker)
    packed = config.policy.sequence_packing.prefix_sharing and backend.packed
    options = make_train_options(config, share_prefixes=packed, tasks=tasks.epoch_size)
    sampling = Sampling(**config.policy.generation.sampling_options())
    learners = await backend.build_learners(algorithm, sampling, count_optimizer_steps(options, tasks.size))
    scorers = await make_scorers(config, backend, algorithm, learners, tracker, last_metrics=lambda: run.last_metrics)

    async def no_group(index: int) -> Group:
        raise ReplayError("a replay samples no rollouts")

    parts: dict[str, Restorable] = {**make_token_budgets(config)}
    await _restore(beginning, config, backend.bundle, learners, parts, tracker)
    columns = ColumnSources(algorithm.requires, scorers)
    stream = RolloutStream(no_group, slots=0, size=0)
    run = _make_run(beginning, options, algorithm, learners, parts, columns, stream, tracker)
    return run


async def _build_recorded(beginning: Beginning, config: RecordedRunConfig, algorithm: Algorithm, tracker: Tracker) -> TrainingRun:
    examples_of = read_examples(config, config.data.train, "train", algorithm)
    backend = await make_backend(config, None, tracker)
    examples = join_examples(config, config.data.train, examples_of, algorithm, backend.bundle)
    packed = config.policy.sequence_packing.prefix_sharing and backend.packed
    options = make_recorded_options(config, examples.epoch_size, share_prefixes=packed)
    learners = await backend.build_learners(algorithm, Sampling(), count_optimizer_steps(options, examples.size))
    scorers = await make_scorers(config, backend, algorithm, learners, tracker, examples.read_all)
    parts: dict[str, Restorable] = {DATA: DataState(examples)} if examples.resumable else {}
    parts |= make_token_budgets(config)
    state = await _restore(beginning, config, backend.bundle, learners, parts, tracker)
    stream = make_recorded_stream(examples, options, None if state is None else state.stream)
    columns = ColumnSources(algorithm.requires, scorers)
    return _make_run(beginning, options, algorithm, learners, parts, columns, stream, tracker)


async def _restore(
    beginning: Beginning,
    config: TrainingRunConfig,
    bundle: TokenizerBundle,
    learners: dict[str, LearnerClient],
    parts: dict[str, Restorable],
    tracker: Tracker,
) -> RunState | None:
    """Load the checkpoint into the learners, in place; None for the initial model."""
    state = None
    if beginning.checkpoint is not None:
        checkpoints = replace(make_checkpoints(config, bundle.save), folder=beginning.checkpoint.parent)
        state = checkpoints.load(beginning.checkpoint, {**learners, **parts})
    await settle_token_budgets(config, learners, parts, tracker)
    return state


def _make_run(
    beginning: Beginning,
    options: TrainOptions,
    algorithm: Algorithm,
    learners: dict[str, LearnerClient],
    parts: dict[str, Restorable],
    columns: ColumnSources,
    stream: RolloutStream,
    tracker: Tracker,
) -> TrainingRun:
    return TrainingRun(
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
