"""The training loop: collect groups, score, update, publish weights, release slots; validate, save and log when due.

Every run uses this loop: synchronous or asynchronous, with any algorithm, backend and placement. The stream (``strop.rollouts.stream``)
limits how far rollouts may run ahead of training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from strop import metrics
from strop.algorithms.base import Algorithm, Outputs, TokenOutputs
from strop.checkpointing.base import Checkpointer, RunState
from strop.data.packing import pack, split_mini_batches
from strop.learner.base import ColumnSource, Learner, require_token_outputs
from strop.monitoring.rollout_store.rollout_store import (
    DropReason,
    RolloutRecord,
    RolloutStore,
    make_records,
    split_by_rollout,
)
from strop.monitoring.trackers.base import Tracker
from strop.monitoring.watchdog.waits import WaitKind, waiting
from strop.rollouts.stream import EndOfTasks, GroupStream, StreamState
from strop.trainer.early_stop import EarlyStop, StopRequest
from strop.trainer.evaluation import Validator
from strop.trainer.mismatch import MismatchGuard, measure_mismatch
from strop.trainer.step_metrics import batch_metrics, group_metrics
from strop.types import Batch, Group
from strop.weight_sync.base import WeightSync


class TooManyDropped(RuntimeError):
    """Too many groups were dropped to continue the run. The message gives the reasons."""


class TooFewTasks(RuntimeError):
    """There were too few tasks to train a single step. The message says what happened to them."""


# When the loop waits for the groups in flight: before training, if learner and generator take turns on the same devices; before the new
# weights are published, if they run on separate devices; or never, so that weights change while groups are sampled.
DrainBefore = Literal["training", "publishing", "never"]


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


@dataclass(kw_only=True)
class Run:
    """The components and the state of a training run. ``step`` counts trained batches and is also the version of the weights."""

    options: TrainOptions
    algorithm: Algorithm
    stream: GroupStream
    learners: Mapping[str, Learner]
    scorers: Mapping[str, ColumnSource]  # column that the algorithm requires -> its source
    weights: WeightSync
    tracker: Tracker
    rollouts: RolloutStore
    decode: Callable[[list[int]], str] | None = None  # the tokenizer's, for stored prompts
    evaluator: Validator | None = None
    early_stop: EarlyStop | None = None
    stop_request: StopRequest = field(default_factory=StopRequest)
    mismatch: MismatchGuard = field(default_factory=MismatchGuard)
    checkpoints: Checkpointer | None = None
    step: int = 0
    done: bool = False
    stopping: bool = False  # a stop was requested; the run continues when it is started again
    errors_in_a_row: int = 0
    saved_step: int = -1  # the step of the newest checkpoint
    last_metrics: Mapping[str, float] = field(default_factory=dict)  # metrics of the last step
    dropped: list[tuple[Group, DropReason]] = field(default_factory=list)  # dropped in the current step, with the reason

    @property
    def finished(self) -> bool:
        return self.done or self.step >= self.options.max_steps

    @property
    def should_stop(self) -> bool:
        """Whether the loop starts no further step."""
        return self.finished or self.stopping


async def train(run: Run) -> None:
    """Train until the last step, the last task, early stopping or a stop request."""
    await run.weights.publish(run.step)
    await validate_at_start(run)
    while not run.should_stop:
        clock = PhaseTimer()
        begun = run.stream.state()
        with clock("generation"):
            groups, logged = await collect(run)
        if len(groups) < run.options.groups_per_step:
            await handle_end_of_tasks(run, len(groups), begun)
            break
        with clock("drain"):
            await drain_if_due(run, before="training")
            await run.weights.yield_device()
        with clock("packing"):
            batch = pack(groups, run.algorithm, share_prefixes=run.options.share_prefixes)
        with clock("logprobs"):
            for required in sorted(run.algorithm.requires):
                batch = batch.with_columns(await run.scorers[required].columns(batch, groups))
        batch = run.algorithm.token_credit(batch)
        with clock("policy_training"):
            before, trained = await update(run, batch)
        with clock("drain"):
            await drain_if_due(run, before="publishing")
        run.step += 1
        with clock("weight_sync"):
            synced = await run.weights.publish(run.step)
        run.stream.release(len(groups))
        with clock("storing"):
            run.rollouts.write(run.step, rollout_records(run, groups, batch, before))
        run.last_metrics = {**logged, **trained, **metrics.to_floats(synced)}
        run.done = check_early_stop(run, run.last_metrics)
        with clock("validation"):
            validated = await validate_if_due(run)
        run.last_metrics = {**run.last_metrics, **validated}
        run.done |= check_early_stop(run, validated)
        with clock("checkpointing"):
            save_if_due(run, run.stream.state())
        run.tracker.log(run.step, {**run.last_metrics, **clock.metrics(run, batch)})


async def drain_if_due(run: Run, *, before: DrainBefore) -> None:
    """Wait for the groups in flight if ``drain_before`` asks for it here. Then all tokens of a rollout have the same weight version."""
    if run.options.drain_before == before:
        run.tracker.progress(f"finishing the groups in flight before {before}")
        await run.stream.drain()


async def handle_end_of_tasks(run: Run, left_over_groups: int, begun: StreamState) -> None:
    """Validate, save and log as after the last step, because no tasks are left. Raises TooFewTasks if no step was trained.

    The checkpoint stores the stream's state from before the leftover tasks were started, so that a run with more epochs trains on them.
    """
    dropped = f"; {len(run.dropped)} groups were dropped:{_describe_drops(run)}" if run.dropped else ""
    if run.step == 0:
        raise TooFewTasks(
            f"the tasks are used up and nothing was trained: {left_over_groups} groups are left, and one step needs "
            f"{run.options.groups_per_step} ({run.options.batch_key}). Add data, allow more epochs "
            f"({run.options.section}.max_num_epochs; null is unbounded), or lower {run.options.batch_key}{dropped}"
        )
    run.tracker.note(
        f"the tasks are used up after step {run.step}: {left_over_groups} groups left over are not trained on{dropped}"
    )
    run.done = True
    known = any(name.startswith("validation/") for name in run.last_metrics)
    validated = {} if known else await validate_if_due(run)
    run.last_metrics = {**run.last_metrics, **validated}
    if run.saved_step < run.step:
        save_if_due(run, begun)
    if validated:
        run.tracker.log(run.step, validated)


async def collect(run: Run) -> tuple[list[Group], dict[str, float]]:
    """Collect the groups for one step. Drop groups that failed or do not pass the algorithm's filter, and release their slots at once.

    Returns the groups and their metrics; fewer groups than a step needs only when no tasks are left. Raises TooManyDropped.
    """
    wanted = run.options.groups_per_step
    kept: list[Group] = []
    run.dropped.clear()
    while len(kept) < wanted:
        run.tracker.progress(f"generating: {len(kept)} of {wanted} groups")
        try:
            group = await run.stream.next()
        except EndOfTasks:
            break
        reason = drop_reason(run, group)
        if reason is None:
            kept.append(group)
        else:
            run.dropped.append((group, reason))
            run.stream.release(1)
        run.errors_in_a_row = run.errors_in_a_row + 1 if reason == "error" else 0
        _check_drop_limits(run, len(kept))
    staleness = [] if run.algorithm.recorded_data else [run.step - group.version for group in kept]
    if staleness and max(staleness) > run.options.max_staleness:
        raise AssertionError(f"a group is {max(staleness)} steps old; the stream allows {run.options.max_staleness}")
    return kept, group_metrics(kept, run.dropped, staleness, recorded=bool(run.algorithm.recorded_data))


def drop_reason(run: Run, group: Group) -> DropReason | None:
    """Return why a group is dropped; None if it is trained on."""
    if group.errors:
        return "error"
    if run.options.drop_stale and run.step - group.version > run.options.max_staleness:
        return "stale"
    return None if run.algorithm.keep(group) else "filtered"


def _check_drop_limits(run: Run, kept: int) -> None:
    options = run.options
    if run.errors_in_a_row >= options.max_errors_in_a_row:
        raise TooManyDropped(
            f"{run.errors_in_a_row} groups in a row failed ({options.section}.max_errors_in_a_row); the last reasons:{_describe_drops(run)}"
        )
    dropped = [group for group, reason in run.dropped if reason != "stale"]
    if kept < options.groups_per_step and kept + len(dropped) >= options.max_groups_per_step:
        mean = sum(float(group.rewards.mean()) for group in dropped) / max(len(dropped), 1)
        raise TooManyDropped(
            f"{kept + len(dropped)} groups were generated and only {kept} of the {options.groups_per_step} wanted passed the "
            f"filter; the mean reward of the dropped ones is {mean:.3g}: at the lowest reward, the task is too hard or the reward is "
            f"broken; at the highest, it is too easy. Change the task, or raise {options.section}.dynamic_sampling_max_gen_batches"
        )


def _describe_drops(run: Run) -> str:
    """Describe why groups of this step were dropped, one reason per line: the last three distinct errors, then the number of groups that
    did not pass the filter and of those that were too old."""
    errors = dict.fromkeys(error for group, reason in run.dropped if reason == "error" for error in group.errors)
    why = [reason for _, reason in run.dropped]
    counts = {"did not pass the algorithm's filter": why.count("filtered"), "were too old": why.count("stale")}
    lines = [*list(errors)[-3:], *(f"{count} {what}" for what, count in counts.items() if count)]
    return "".join(f"\n  {line}" for line in lines)


async def update(run: Run, batch: Batch) -> tuple[Outputs, dict[str, float]]:
    """Run ``update_epochs`` passes of mini-batches, one optimizer step each.

    Returns the policy's outputs for the batch from before the first optimizer step, and metrics.
    """
    options, losses = run.options, run.algorithm.losses(run.step)
    several = options.steps_per_batch * options.update_epochs > 1
    before = await run.learners["policy"].score(batch) if several or "policy" not in losses else None
    if isinstance(before, TokenOutputs):
        batch = batch.with_column("policy_logprobs", before.logprobs)
    logged: list[metrics.Metrics] = []
    steps = 0
    for _ in range(options.update_epochs):
        for part in split_mini_batches(batch, options.steps_per_batch):
            steps += 1
            run.tracker.progress(f"training: optimizer step {steps} of {options.steps_per_batch * options.update_epochs}")
            surveyed = await prepare_step(run, part.batch)
            for name, loss in losses.items():
                seen = replace(surveyed, zero_gradient=run.algorithm.zero_gradient(surveyed, name))
                result = await run.learners[name].forward_backward(seen, loss)
                prefix = "" if name == "policy" else f"{name}_"
                measured = {**result.metrics, **await run.learners[name].step()}
                logged.append({prefix + key: metrics.to_step_mean(metric) for key, metric in measured.items()})
                if name == "policy" and before is None:
                    before = result.outputs
    assert before is not None
    trained = {f"train/{name}": value for name, value in metrics.to_floats(metrics.merge(*logged)).items()}
    recorded = bool(run.algorithm.recorded_data)
    described = {**batch_metrics(batch, before, recorded=recorded), **check_mismatch(run, batch, before)}
    return before, {**trained, **run.algorithm.report(batch), **described}


def check_mismatch(run: Run, batch: Batch, old_outputs: Outputs) -> dict[str, float]:
    """Compare the log-probabilities of sampler and learner; warn if they differ too much. Raises MismatchTooLarge."""
    if run.algorithm.recorded_data or not isinstance(old_outputs, TokenOutputs):
        return {}
    report = measure_mismatch(batch, old_outputs.logprobs, run.step)
    if (warning := run.mismatch.check(run.step + 1, report)) is not None:
        run.tracker.note(f"warning: {warning}")
    return report.metrics()


async def prepare_step(run: Run, batch: Batch) -> Batch:
    """Add the columns that depend on the whole optimizer step, before it is split into micro-batches."""
    outputs = await run.learners["policy"].score(batch) if run.algorithm.needs_step_outputs else None
    return run.algorithm.prepare_step(batch, None if outputs is None else require_token_outputs(outputs))


def rollout_records(run: Run, groups: Sequence[Group], batch: Batch, old_outputs: Outputs) -> list[RolloutRecord]:
    """Return the records of this step's rollouts to store, including dropped ones; none for recorded data, which is stored already."""
    if run.algorithm.recorded_data:
        return []
    learner_logprobs = require_token_outputs(old_outputs).logprobs
    credit = split_by_rollout(batch.advantages, batch, groups)
    return make_records(
        run.step,
        [*groups, *(group for group, _ in run.dropped)],
        advantages={key: float(column.mean()) for key, column in credit.items() if len(column)},
        learner_logprobs=split_by_rollout(learner_logprobs, batch, groups),
        dropped={group.index: reason for group, reason in run.dropped},
        decode=run.decode,
    )


async def validate_at_start(run: Run) -> None:
    """Validate the policy before training, if due, and log the metrics as step 0."""
    due = run.options.val_at_start and run.step == 0 and not check_stop_request(run)
    if run.evaluator is not None and due:
        run.tracker.log(0, await run.evaluator.evaluate(run.step, run.tracker))
    check_stop_request(run)


async def validate_if_due(run: Run) -> dict[str, float]:
    options = run.options
    periodic = options.val_period and run.step % options.val_period == 0 and run.step >= options.val_start_at
    last = options.val_at_end and run.finished
    if run.evaluator is None or not (periodic or last):
        return {}
    return await run.evaluator.evaluate(run.step, run.tracker)


def save_if_due(run: Run, stream: StreamState) -> None:
    period = run.options.save_period
    if run.checkpoints is None or not period or not (run.step % period == 0 or run.should_stop):
        return
    run.tracker.progress("saving a checkpoint")
    state = RunState(step=run.step, stream=stream, logged=run.last_metrics, early_stop=run.early_stop)
    path = run.checkpoints.save(state, run.learners)
    run.saved_step = run.step
    run.tracker.note(f"checkpoint: {path}" if path.exists() else f"checkpoint, written in the background: {path}")


def check_early_stop(run: Run, logged: Mapping[str, float]) -> bool:
    """Return whether the metrics stop the run early, and log the reason. Also check for a stop request."""
    check_stop_request(run)
    if run.early_stop is None:
        return False
    before, run.early_stop = run.early_stop, run.early_stop.update(logged)
    if run.early_stop.reason is None or run.early_stop is before:
        return False
    run.tracker.note(f"{run.early_stop.reason}: training ends")
    return True


def check_stop_request(run: Run) -> bool:
    """Return whether a stop was requested, and log it once. The run then stops without what is due after the last step."""
    if not run.stopping and (reason := run.stop_request.check()) is not None:
        run.stopping = True
        run.tracker.note(f"{reason}: this run ends after step {run.step}")
    return run.stopping


# The watchdog limit that applies to each phase. Other phases have no limit, or contain waits with limits of their own.
PHASE_KINDS: Mapping[str, WaitKind] = {
    "drain": "generation",
    "logprobs": "training",
    "policy_training": "training",
    "weight_sync": "weight_sync",
    "checkpointing": "checkpoint",
}


class PhaseTimer:
    """Measures the seconds that each phase of a step takes, and registers the phase with the watchdog while it runs."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        with waiting("training loop", on=phase, kind=PHASE_KINDS.get(phase, "")):
            yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def metrics(self, run: Run, batch: Batch) -> dict[str, float]:
        total = time.perf_counter() - self.started
        timing = {f"timing/train/{phase}": seconds for phase, seconds in self.seconds.items()}
        sampled = len(batch.target) + sum(rollout.sampled_tokens for group, _ in run.dropped for rollout in group.rollouts)
        busy = total - self.seconds.get("validation", 0.0)
        return {
            **timing,
            "timing/train/total_step_time": total,
            "performance/tokens_per_sec": len(batch.tokens) / busy,
            **(
                {}
                if run.algorithm.recorded_data
                else {"performance/generation_tokens_per_sec": sampled / max(self.seconds["generation"], 1e-9)}
            ),
            "performance/training_tokens_per_sec": len(batch.tokens) / max(self.seconds["policy_training"], 1e-9),
        }
