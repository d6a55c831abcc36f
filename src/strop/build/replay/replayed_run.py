"""A run as it was before a step, in this process and without engines, environments and anything that it writes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from strop.algorithms.base import Algorithm
from strop.build.backend import make_backend
from strop.build.lifecycle import make_checkpoints, seed_everything
from strop.build.models import TokenizerBundle
from strop.build.recorded_run import join_examples, make_recorded_options, make_recorded_stream, read_examples
from strop.build.replay.replay_error import ReplayError
from strop.build.replay.replay_plan import ReplayPlan
from strop.build.replay.stored_groups import StoredStep, rebuild_groups
from strop.build.resume.token_budgets import make_token_budgets, settle_token_budgets
from strop.build.rollout_run import make_train_options
from strop.build.scorers import count_optimizer_steps, make_scorers
from strop.build.tasks import make_training_tasks
from strop.checkpointing.base import Restorable, RunState
from strop.config import RecordedRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.data.data_state import DataState
from strop.learner.client import LearnerClient
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.base import NullTracker, Tracker
from strop.rollouts.stream import RolloutStream
from strop.sampling import Sampling
from strop.trainer.column_sources import ColumnSources
from strop.trainer.run import DATA, TrainingRun, TrainOptions
from strop.trainer.train import collect
from strop.types import Group
from strop.weight_sync.in_process import InProcessWeights


@asynccontextmanager
async def open_replayed_run(
    plan: ReplayPlan, config: TrainingRunConfig, algorithm: Algorithm
) -> AsyncIterator[tuple[TrainingRun, StoredStep]]:
    """Build the run as it was before the step, and what the step trains on. Raises ReplayError, CheckpointError, ModelNotFound."""
    seed_everything(config.training.seed)
    tracker = NullTracker()
    if isinstance(config, RolloutRunConfig):
        refuse_unstored(config, algorithm)
        step = rebuild_groups(RolloutStore(plan.folder, "none").read(plan.step))
        run = await _build_rollouts(plan, config, algorithm, tracker)
    else:
        assert isinstance(config, RecordedRunConfig)
        run = await _build_recorded(plan, config, algorithm, tracker)
        groups = await collect(run)
        step = StoredStep(tuple(groups), tuple(run.dropped))
    try:
        yield run, step
    finally:
        await run.stream.close()


def refuse_unstored(config: RolloutRunConfig, algorithm: Algorithm) -> None:
    """Raise ReplayError if the step read something that its rollouts do not hold."""
    policy = config.policy
    if policy.router_replay.enabled:
        raise ReplayError("policy.router_replay.enabled is true, and the experts of each token are not stored with the rollouts")
    if getattr(policy.generation, "keep_sampling_mask", False):
        raise ReplayError(
            "policy.generation.keep_sampling_mask is true, and the sets that tokens were sampled from are not stored with the rollouts"
        )
    if algorithm.greedy_baseline:
        raise ReplayError(
            "the algorithm compares with a greedy rollout of each group, which is not stored with the others, so the step cannot be "
            "replayed under it; choose another algorithm or advantage"
        )


async def _build_rollouts(plan: ReplayPlan, config: RolloutRunConfig, algorithm: Algorithm, tracker: Tracker) -> TrainingRun:
    tasks = make_training_tasks(config)
    backend = await make_backend(config, None, tracker)
    packed = config.policy.sequence_packing.prefix_sharing and backend.packed
    options = make_train_options(config, share_prefixes=packed, tasks=tasks.epoch_size)
    sampling = Sampling(**config.policy.generation.sampling_options())
    learners = await backend.build_learners(algorithm, sampling, count_optimizer_steps(options, tasks.size))
    scorers = await make_scorers(config, backend, algorithm, learners, tracker, last_metrics=lambda: run.last_metrics)

    async def no_group(index: int) -> Group:
        raise ReplayError("a replay samples no rollouts")

    await _restore(plan, config, backend.bundle, learners, {}, tracker)
    columns = ColumnSources(algorithm.requires, scorers)
    run = _make_run(plan, options, algorithm, learners, columns, RolloutStream(no_group, slots=0, size=0), tracker)
    return run


async def _build_recorded(plan: ReplayPlan, config: RecordedRunConfig, algorithm: Algorithm, tracker: Tracker) -> TrainingRun:
    parts = read_examples(config, config.data.train, "train", algorithm)
    backend = await make_backend(config, None, tracker)
    examples = join_examples(config, config.data.train, parts, algorithm, backend.bundle)
    packed = config.policy.sequence_packing.prefix_sharing and backend.packed
    options = make_recorded_options(config, examples.epoch_size, share_prefixes=packed)
    learners = await backend.build_learners(algorithm, Sampling(), count_optimizer_steps(options, examples.size))
    scorers = await make_scorers(config, backend, algorithm, learners, tracker, examples.read_all)
    data: dict[str, Restorable] = {DATA: DataState(examples)} if examples.resumable else {}
    state = await _restore(plan, config, backend.bundle, learners, data, tracker)
    stream = make_recorded_stream(examples, options, None if state is None else state.stream)
    return _make_run(plan, options, algorithm, learners, ColumnSources(algorithm.requires, scorers), stream, tracker)


async def _restore(
    plan: ReplayPlan,
    config: TrainingRunConfig,
    bundle: TokenizerBundle,
    learners: dict[str, LearnerClient],
    parts: dict[str, Restorable],
    tracker: Tracker,
) -> RunState | None:
    """Load the checkpoint into the learners, in place; None for the initial model."""
    budgets = make_token_budgets(config)
    state = None
    if plan.checkpoint is not None:
        checkpoints = make_checkpoints(config, bundle.save)
        state = checkpoints.load(Path(plan.checkpoint), {**learners, **parts, **budgets})
    await settle_token_budgets(config, learners, budgets, tracker)
    return state


def _make_run(
    plan: ReplayPlan,
    options: TrainOptions,
    algorithm: Algorithm,
    learners: dict[str, LearnerClient],
    columns: ColumnSources,
    stream: RolloutStream,
    tracker: Tracker,
) -> TrainingRun:
    return TrainingRun(
        options=options,
        algorithm=algorithm,
        stream=stream,
        learners=learners,
        columns=columns,
        weights=InProcessWeights([]),
        tracker=tracker,
        rollouts=RolloutStore(plan.folder, "none"),
        step=plan.step - 1,
        last_metrics=plan.previous,
    )
