"""Replay a step as it was, and under other settings, and compare the two."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop import plugins
from strop.algorithms.base import Algorithm
from strop.checkpointing.base import RunState
from strop.config import ConfigError, RolloutRunConfig, TrainingRunConfig
from strop.determinism import set_deterministic
from strop.extensions.replay.replay_plan import Configured, ReplayError, ReplayPlan, plan_replay
from strop.extensions.replay.replayed_step import (
    ComparedMetrics,
    EqualPasses,
    MovedRollout,
    ReplayedStep,
    compare_metrics,
    compare_passes,
    passes_may_differ,
    replay_step,
)
from strop.extensions.replay.stored_groups import LearnerReads, StoredStep, rebuild_groups
from strop.learner.client import ColumnSources, LearnerClient
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.run_starts import RunStart, read_run_starts
from strop.monitoring.trackers.base import NullTracker
from strop.rollouts.stream import GroupStream, RolloutStream
from strop.runs.backend import Backend, make_backend, make_columns
from strop.runs.dry_run.examined_models import find_optimizer_problems
from strop.runs.lifecycle import make_checkpoints, seed_everything
from strop.runs.restore import make_token_budgets, settle_token_budgets
from strop.runs.rollout_run import SampledSource, find_source
from strop.runs.run_source import RunSource
from strop.safety.printable import make_printable
from strop.safety.remote_code import trust_remote_code
from strop.storage.files import atomic_write, clean_json
from strop.trainer.run import TrainingRun
from strop.trainer.train import collect
from strop.types import Group
from strop.weight_sync.in_process import InProcessWeights


def find_start(folder: Path, step: int) -> RunStart:
    """Return the start of a run that trained a step; an empty one of a run that did not write its starts down."""
    return next((start for start in reversed(read_run_starts(folder)) if start.after_step < step), RunStart(after_step=0))


def use_threads(start: RunStart, config: TrainingRunConfig) -> None:
    """Compute with as many threads as the start of a run did, unless the configuration says how many."""
    threads = start.hardware.get("threads", "")
    if config.policy.num_threads is None and threads.isdigit() and 0 < int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))


@contextmanager
def keep_threads() -> Iterator[None]:
    """Set the number of threads back at the end."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    source = find_source(config).read(config, algorithm, tracker, None)
    backend = await make_backend(config, None, tracker)
    options = source.prepare(backend)
    learners = await backend.build_learners(algorithm, source.sampling, options.count_optimizer_steps(source.size))
    columns = await make_columns(
        config, backend, algorithm, learners, tracker, await source.make_columns(backend), lambda: run.last_metrics
    )
    parts = {**make_token_budgets(config), **({} if isinstance(source, SampledSource) else source.make_parts(backend))}
    state = None
    if beginning.checkpoint is not None:
        checkpoints = replace(make_checkpoints(config, backend.bundle.save), folder=beginning.checkpoint.parent)
        state = checkpoints.load(beginning.checkpoint, {**learners, **parts})
    await settle_token_budgets(config, learners, parts, tracker)
    async with _open_stream(source, backend, learners["policy"], columns, state) as stream:
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
        yield ReplayedRun(folder=folder, run=run, config=config)


@asynccontextmanager
async def _open_stream(
    source: RunSource, backend: Backend, policy: LearnerClient, columns: ColumnSources, state: RunState | None
) -> AsyncIterator[GroupStream]:
    """Yield the stream of recorded data, or an empty one: what was sampled is in the store."""
    if isinstance(source, SampledSource):
        yield RolloutStream(_refuse_to_sample, slots=0, size=0)
        return
    async with source.open(backend, policy, columns, state) as supply:
        yield supply.stream


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


log = logging.getLogger(__name__)

Note = Callable[[str], object]
REPLAYS_FOLDER = "replays"  # in the log folder of the run
LISTED = 10  # rollouts that moved most


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """A step under some settings."""

    loss: float | None
    grad_norm: float | None
    tokens: int  # that count in the loss
    clipped_tokens: int | None
    metrics: Mapping[str, float]
    moved_most: Sequence[MovedRollout]


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What a replay found."""

    run: str  # its log folder
    step: int
    weights: str  # with which the step begins: step_N, or the initial model
    overrides: Sequence[str]
    reproduction: ComparedMetrics
    as_it_was: StepOutcome
    changed: StepOutcome | None = None  # with the overrides; None without any
    gradient_cosine: float | None = None  # of the gradients of the first optimizer step, which begins with the same weights
    change_cosine: float | None = None  # of what the whole step changes in the weights
    change_ratio: float | None = None  # norm of that change with the overrides / as it was
    passes: EqualPasses | None = None  # the step trained twice as it was, where equal passes may differ; None: they are equal
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON holds it; numbers that are not finite are None."""
        found: dict[str, Any] = clean_json(
            {**asdict(self), "gradient_degrees": _degrees(self.gradient_cosine), "change_degrees": _degrees(self.change_cosine)}
        )
        return found

    @property
    def failed(self) -> bool:
        """Whether the run could not be reproduced, by more than equal passes differ here."""
        return bool(self.unexplained)

    @property
    def unexplained(self) -> Sequence[str]:
        """The metrics that differ from what was logged, by more than equal passes differ here."""
        return list(self.reproduction.different) if self.passes is None else self.passes.unexplained(self.reproduction)


async def replay(
    folder: Path,
    step: int,
    overrides: Sequence[str] = (),
    *,
    note: Note = log.info,
) -> ReplayResult:
    """Replay a step of the run in ``folder`` from the checkpoint of the step before. Nothing of the run is changed.

    Raises ReplayError, which says which steps can be replayed, ConfigError, CheckpointError, ModelNotFound, StorageError.
    """
    plan = plan_replay(folder, step)
    configured = plan.load()
    changed_config = plan.load(overrides) if overrides else None
    _check(plan, [configured] if changed_config is None else [configured, changed_config])
    beginning = Beginning(step=step - 1, checkpoint=plan.checkpoint, last_metrics=plan.logged.get(step - 1, {}))

    async def train(with_settings: Configured) -> ReplayedStep:
        async with open_replayed_run(folder, beginning, *with_settings) as opened:
            return await replay_step(opened.run, await opened.read_step())

    with trust_remote_code(configured[0].policy.trust_remote_code), keep_threads():
        base, passes = await train(configured), None
        if passes_may_differ(configured[0]):
            note(
                "equal passes may differ on a GPU (policy.deterministic is false): the step is trained a second time, to see by how much"
            )
            passes = compare_passes(step, base.metrics, (await train(configured)).metrics)
        changed = None if changed_config is None else await train(changed_config)
    return replace(_compare(plan, overrides, base, changed), passes=passes)


def _check(plan: ReplayPlan, at_step: Sequence[Configured]) -> None:
    """Find before a model is loaded what a later part of the replay would not read. Raises ReplayError, ConfigError."""
    for config, algorithm in at_step:
        if isinstance(config, RolloutRunConfig):
            read_stored(plan.folder, plan.step, config, algorithm)
        if problems := list(find_optimizer_problems(config)):
            raise ConfigError(problems)


def store_replay(folder: Path, result: ReplayResult) -> Path:
    """Write a result to the log folder of its run, next to those of earlier replays, and return the file."""
    target = folder / REPLAYS_FOLDER
    target.mkdir(exist_ok=True)
    number = 1 + max((int(path.stem.rpartition("_")[2]) for path in target.glob("step_*_*.json")), default=0)
    path = target / f"step_{result.step:06d}_{number:03d}.json"
    with atomic_write(path) as draft:
        draft.write_text(json.dumps(result.to_dict(), allow_nan=False), encoding="utf-8")
    return path


def _compare(
    plan: ReplayPlan,
    overrides: Sequence[str],
    base: ReplayedStep,
    changed: ReplayedStep | None,
) -> ReplayResult:
    return ReplayResult(
        run=str(plan.folder),
        step=plan.step,
        weights=plan.source,
        overrides=tuple(overrides),
        reproduction=compare_metrics(plan.step, plan.logged[plan.step], base.metrics),
        as_it_was=_summarize(base),
        changed=None if changed is None else _summarize(changed),
        gradient_cosine=None if changed is None else _cosine(base.gradient, changed.gradient),
        change_cosine=None if changed is None else _cosine(base.change, changed.change),
        change_ratio=None if changed is None else _ratio(changed.change, base.change),
    )


def _summarize(step: ReplayedStep) -> StepOutcome:
    return StepOutcome(
        loss=step.metrics.get("train/loss"),
        grad_norm=step.metrics.get("train/grad_norm"),
        tokens=step.tokens,
        clipped_tokens=step.clipped_tokens,
        metrics=step.metrics,
        moved_most=sorted(step.rollouts, key=lambda rollout: -abs(rollout.moved))[:LISTED],
    )


def _cosine(first: Tensor, second: Tensor) -> float | None:
    """Return the cosine of the angle between two vectors; None if one is zero, or they are of other parameters."""
    if first.shape != second.shape:
        return None
    product = float(first.double().norm() * second.double().norm())
    return None if not product else max(-1.0, min(1.0, float(first.double() @ second.double()) / product))


def _ratio(first: Tensor, second: Tensor) -> float | None:
    norm = float(second.double().norm())
    return float(first.double().norm()) / norm if norm else None


def _degrees(cosine: float | None) -> float | None:
    return None if cosine is None else math.degrees(math.acos(cosine))


METRICS = (  # of a step, as far as it has them
    "train/loss", "train/grad_norm", "train/lr", "train/ratio_clipped", "train/ratio_outside_clip", "train/probs_ratio",
    "train/kl_penalty", "train/entropy", "train/value_loss", "train/value_grad_norm", "train/preference_loss", "train/accuracy",
    "train/margin", "train/nll", "train/advantages_abs",
)  # fmt: skip


def format_replay(result: ReplayResult) -> Iterator[str]:
    """Yield the lines of a table of what a replay found."""
    yield f"step {result.step} of {result.run}, from {result.weights}"
    yield from _format_reproduction(result)
    yield ""
    headings = ["as it was", *(["with the overrides"] if result.changed else [])]
    outcomes = [result.as_it_was, *([result.changed] if result.changed else [])]
    yield f"{'':<28}" + "".join(f"{heading:>22}" for heading in headings)
    for name in METRICS:
        if any(name in outcome.metrics for outcome in outcomes):
            yield f"{name:<28}" + "".join(f"{_number(outcome.metrics.get(name)):>22}" for outcome in outcomes)
    yield f"{'clipped tokens':<28}" + "".join(f"{_clipped(outcome):>22}" for outcome in outcomes)
    if result.changed is not None:
        yield ""
        yield f"overrides: {' '.join(result.overrides)}"
        yield f"angle between the gradients (first optimizer step): {_angle(result.gradient_cosine)}"
        ratio = "unknown" if result.change_ratio is None else f"{result.change_ratio:.4g} times as far"
        yield f"angle between the changes of the weights: {_angle(result.change_cosine)}; they would have moved {ratio}"
    for heading, outcome in zip(headings, outcomes, strict=True):
        yield ""
        yield from _format_moved(heading, outcome)


def _format_reproduction(result: ReplayResult) -> Iterator[str]:
    found = result.reproduction
    if not found.different:
        others = f"{len(found.not_compared)} more, such as times, are not computed by a replay"
        yield f"{found.compared} logged metrics are reproduced to the last digit; {others}"
        return
    yield f"{len(found.different)} of {found.compared} logged metrics differ:"
    if (passes := result.passes) is not None:
        yield (
            f"  two equal passes differ in {len(passes.different)} of {passes.compared} here (a GPU, policy.deterministic=false); "
            + (
                f"by more than that differ: {', '.join(result.unexplained)}"
                if result.unexplained
                else "none differs by more than that"
            )
        )
    for name, (logged, replayed) in sorted(found.different.items()):
        yield f"  {name}: logged {logged!r}, replayed {replayed!r}"


def _format_moved(heading: str, outcome: StepOutcome) -> Iterator[str]:
    yield f"rollouts that moved most, {heading} (nats of log-probability, after less before):"
    yield f"  {'rollout':<10}{'moved':>12}{'advantage':>12}{'reward':>10}{'tokens':>8}{'clipped':>9}{'gradient':>12}  task"
    for each in outcome.moved_most:
        name = f"{each.group}/{each.sample}"
        yield (
            f"  {name:<10}{each.moved:>12.4g}{each.advantage:>12.4g}{each.reward:>10.4g}{each.tokens:>8}{each.clipped:>9}"
            f"{each.gradient:>12.4g}  {make_printable(each.task_id)}"
        )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.9g}"


def _clipped(outcome: StepOutcome) -> str:
    return "no clip" if outcome.clipped_tokens is None else f"{outcome.clipped_tokens} of {outcome.tokens}"


def _angle(cosine: float | None) -> str:
    return "unknown (one is zero)" if cosine is None else f"{math.degrees(math.acos(cosine)):.2f} degrees (cosine {cosine:.6f})"
