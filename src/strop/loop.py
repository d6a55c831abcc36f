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
from strop.checkpointing.base import Checkpoints, RunState
from strop.data.packing import mini_batches, pack
from strop.evaluation import Validation
from strop.mismatch import MismatchGuard, measure
from strop.reports import batch_metrics, group_metrics
from strop.rollouts.stream import EndOfTasks, GroupStream, StreamState
from strop.stopping import EarlyStop, Stopper
from strop.tracking.base import Tracker
from strop.tracking.rollouts import Dropped, RolloutRecord, RolloutStore, by_rollout, records_of
from strop.training.base import ColumnSource, Learner, token_outputs
from strop.types import Batch, Group
from strop.watch.waits import Kind, waiting
from strop.weights.base import WeightSync


class TooManyDropped(RuntimeError):
    """Too many groups were dropped to continue the run. The message gives the reasons."""


class OutOfTasks(RuntimeError):
    """There were too few tasks to train a single step. The message says what happened to them."""


# When the loop waits for the groups in flight: before training, if learner and generator take turns on the same devices; before the new
# weights are published, if they run on separate devices; or never, so that weights change while groups are sampled.
Drain = Literal["training", "publishing", "never"]


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Options of the training loop. Periods are in steps; 0 means never."""

    max_steps: int
    groups_per_step: int
    section: str = "grpo"  # section of the configuration, for messages that name its keys
    batch_key: str = "grpo.num_prompts_per_step"
    steps_per_batch: int = 1  # optimizer steps in one pass over a batch
    update_epochs: int = 1  # passes over a batch
    max_staleness: int = 0  # how many steps newer the trained policy may be than the one that started a rollout
    drops_stale: bool = False  # the stream's order does not wait for slow groups: older ones are dropped
    drain_before: Drain = "never"
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

    options: LoopOptions
    algorithm: Algorithm
    stream: GroupStream
    learners: Mapping[str, Learner]
    scorers: Mapping[str, ColumnSource]  # column that the algorithm requires -> its source
    weights: WeightSync
    tracker: Tracker
    rollouts: RolloutStore
    decode: Callable[[list[int]], str] | None = None  # the tokenizer's, for stored prompts
    evaluator: Validation | None = None
    early_stop: EarlyStop | None = None
    stopper: Stopper = field(default_factory=Stopper)
    mismatch: MismatchGuard = field(default_factory=MismatchGuard)
    checkpoints: Checkpoints | None = None
    step: int = 0
    done: bool = False
    leaving: bool = False  # a stop was requested; the run continues when it is started again
    errors_in_a_row: int = 0
    saved: int = -1  # the step of the newest checkpoint
    logged: Mapping[str, float] = field(default_factory=dict)  # metrics of the last step
    dropped: list[tuple[Group, Dropped]] = field(default_factory=list)  # dropped in the current step, with the reason

    @property
    def finished(self) -> bool:
        return self.done or self.step >= self.options.max_steps

    @property
    def over(self) -> bool:
        """Whether the loop starts no further step."""
        return self.finished or self.leaving


async def train(run: Run) -> None:
    """Train until the last step, the last task, early stopping or a stop request."""
    await run.weights.publish(run.step)
    await validate_before(run)
    while not run.over:
        clock = Stopwatch()
        begun = run.stream.state()
        with clock("generation"):
            groups, logged = await collect(run)
        if len(groups) < run.options.groups_per_step:
            await end_of_tasks(run, len(groups), begun)
            break
        with clock("drain"):
            await drain(run, before="training")
            await run.weights.lend_to_learner()
        with clock("packing"):
            batch = pack(groups, run.algorithm, share_prefixes=run.options.share_prefixes)
        with clock("logprobs"):
            for required in sorted(run.algorithm.requires):
                batch = batch.with_extras(await run.scorers[required].columns(batch, groups))
        batch = run.algorithm.credit(batch)
        with clock("policy_training"):
            before, trained = await update(run, batch)
        with clock("drain"):
            await drain(run, before="publishing")
        run.step += 1
        with clock("weight_sync"):
            synced = await run.weights.publish(run.step)
        run.stream.release(len(groups))
        with clock("storing"):
            run.rollouts.write(run.step, records_of_step(run, groups, batch, before))
        run.logged = {**logged, **trained, **metrics.values(synced)}
        run.done = stops(run, run.logged)
        with clock("validation"):
            validated = await validate_if_due(run)
        run.logged = {**run.logged, **validated}
        run.done |= stops(run, validated)
        with clock("checkpointing"):
            save_if_due(run, run.stream.state())
        run.tracker.log(run.step, {**run.logged, **clock.metrics(run, batch)})


async def drain(run: Run, *, before: Drain) -> None:
    """Wait for the groups in flight if ``drain_before`` asks for it here. Then all tokens of a rollout have the same weight version."""
    if run.options.drain_before == before:
        run.tracker.progress(f"finishing the groups in flight before {before}")
        await run.stream.drained()


async def end_of_tasks(run: Run, left_over: int, begun: StreamState) -> None:
    """Validate, save and log as after the last step, because no tasks are left. Raises OutOfTasks if no step was trained.

    The checkpoint stores the stream's state from before the leftover tasks were started, so that a run with more epochs trains on them.
    """
    dropped = f"; {len(run.dropped)} groups were dropped:{_reasons(run)}" if run.dropped else ""
    if run.step == 0:
        raise OutOfTasks(
            f"the tasks are used up and nothing was trained: {left_over} groups are left, and one step needs "
            f"{run.options.groups_per_step} ({run.options.batch_key}). Add data, allow more epochs "
            f"({run.options.section}.max_num_epochs; null is unbounded), or lower {run.options.batch_key}{dropped}"
        )
    run.tracker.note(f"the tasks are used up after step {run.step}: {left_over} groups left over are not trained on{dropped}")
    run.done = True
    known = any(name.startswith("validation/") for name in run.logged)
    validated = {} if known else await validate_if_due(run)
    run.logged = {**run.logged, **validated}
    if run.saved < run.step:
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
        reason = refused(run, group)
        if reason is None:
            kept.append(group)
        else:
            run.dropped.append((group, reason))
            run.stream.release(1)
        run.errors_in_a_row = run.errors_in_a_row + 1 if reason == "error" else 0
        _stop_if_hopeless(run, len(kept))
    staleness = [] if run.algorithm.recorded else [run.step - group.version for group in kept]
    if staleness and max(staleness) > run.options.max_staleness:
        raise AssertionError(f"a group is {max(staleness)} steps old; the stream allows {run.options.max_staleness}")
    return kept, group_metrics(kept, run.dropped, staleness, recorded=bool(run.algorithm.recorded))


def refused(run: Run, group: Group) -> Dropped | None:
    """Return why a group is dropped; None if it is trained on."""
    if group.errors:
        return "error"
    if run.options.drops_stale and run.step - group.version > run.options.max_staleness:
        return "stale"
    return None if run.algorithm.keep(group) else "filtered"


def _stop_if_hopeless(run: Run, kept: int) -> None:
    options = run.options
    if run.errors_in_a_row >= options.max_errors_in_a_row:
        raise TooManyDropped(
            f"{run.errors_in_a_row} groups in a row failed ({options.section}.max_errors_in_a_row); the last reasons:{_reasons(run)}"
        )
    dropped = [group for group, reason in run.dropped if reason != "stale"]
    if kept < options.groups_per_step and kept + len(dropped) >= options.max_groups_per_step:
        mean = sum(float(group.rewards.mean()) for group in dropped) / max(len(dropped), 1)
        raise TooManyDropped(
            f"{kept + len(dropped)} groups were generated and only {kept} of the {options.groups_per_step} wanted passed the "
            f"filter; the mean reward of the dropped ones is {mean:.3g}: at the lowest reward, the task is too hard or the reward is "
            f"broken; at the highest, it is too easy. Change the task, or raise {options.section}.dynamic_sampling_max_gen_batches"
        )


def _reasons(run: Run) -> str:
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
        batch = batch.with_extra("policy_logprobs", before.logprobs)
    logged: list[metrics.Metrics] = []
    steps = 0
    for _ in range(options.update_epochs):
        for part in mini_batches(batch, options.steps_per_batch):
            steps += 1
            run.tracker.progress(f"training: optimizer step {steps} of {options.steps_per_batch * options.update_epochs}")
            surveyed = await survey(run, part.batch)
            for name, loss in losses.items():
                seen = replace(surveyed, idle=run.algorithm.idle(surveyed, name))
                result = await run.learners[name].forward_backward(seen, loss)
                prefix = "" if name == "policy" else f"{name}_"
                measured = {**result.metrics, **await run.learners[name].step()}
                logged.append({prefix + key: metrics.per_step(metric) for key, metric in measured.items()})
                if name == "policy" and before is None:
                    before = result.outputs
    assert before is not None
    trained = {f"train/{name}": value for name, value in metrics.values(metrics.merge(*logged)).items()}
    recorded = bool(run.algorithm.recorded)
    described = {**batch_metrics(batch, before, recorded=recorded), **agreement(run, batch, before)}
    return before, {**trained, **run.algorithm.report(batch), **described}


def agreement(run: Run, batch: Batch, before: Outputs) -> dict[str, float]:
    """Compare the log-probabilities of sampler and learner; warn if they differ too much. Raises MismatchTooLarge."""
    if run.algorithm.recorded or not isinstance(before, TokenOutputs):
        return {}
    report = measure(batch, before.logprobs, run.step)
    if (warning := run.mismatch.judge(run.step + 1, report)) is not None:
        run.tracker.note(f"warning: {warning}")
    return report.metrics()


async def survey(run: Run, batch: Batch) -> Batch:
    """Add the columns that depend on the whole optimizer step, before it is split into micro-batches."""
    outputs = await run.learners["policy"].score(batch) if run.algorithm.surveys else None
    return run.algorithm.survey(batch, None if outputs is None else token_outputs(outputs))


def records_of_step(run: Run, groups: Sequence[Group], batch: Batch, before: Outputs) -> list[RolloutRecord]:
    """Return the records of this step's rollouts to store, including dropped ones; none for recorded data, which is stored already."""
    if run.algorithm.recorded:
        return []
    learner_logprobs = token_outputs(before).logprobs
    credit = by_rollout(batch.advantages, batch, groups)
    return records_of(
        run.step,
        [*groups, *(group for group, _ in run.dropped)],
        advantages={key: float(column.mean()) for key, column in credit.items() if len(column)},
        learner_logprobs=by_rollout(learner_logprobs, batch, groups),
        dropped={group.index: reason for group, reason in run.dropped},
        decode=run.decode,
    )


async def validate_before(run: Run) -> None:
    """Validate the policy before training, if due, and log the metrics as step 0."""
    due = run.options.val_at_start and run.step == 0 and not leaves(run)
    if run.evaluator is not None and due:
        run.tracker.log(0, await run.evaluator.evaluate(run.step, run.tracker))
    leaves(run)


async def validate_if_due(run: Run) -> dict[str, float]:
    options = run.options
    periodic = options.val_period and run.step % options.val_period == 0 and run.step >= options.val_start_at
    last = options.val_at_end and run.finished
    if run.evaluator is None or not (periodic or last):
        return {}
    return await run.evaluator.evaluate(run.step, run.tracker)


def save_if_due(run: Run, stream: StreamState) -> None:
    period = run.options.save_period
    if run.checkpoints is None or not period or not (run.step % period == 0 or run.over):
        return
    run.tracker.progress("saving a checkpoint")
    state = RunState(step=run.step, stream=stream, logged=run.logged, early_stop=run.early_stop)
    path = run.checkpoints.save(state, run.learners)
    run.saved = run.step
    run.tracker.note(f"checkpoint: {path}" if path.exists() else f"checkpoint, written in the background: {path}")


def stops(run: Run, logged: Mapping[str, float]) -> bool:
    """Return whether the metrics stop the run early, and log the reason. Also check for a stop request."""
    leaves(run)
    if run.early_stop is None:
        return False
    before, run.early_stop = run.early_stop, run.early_stop.seen(logged)
    if run.early_stop.reason is None or run.early_stop is before:
        return False
    run.tracker.note(f"{run.early_stop.reason}: training ends")
    return True


def leaves(run: Run) -> bool:
    """Return whether a stop was requested, and log it once. The run then stops without what is due after the last step."""
    if not run.leaving and (reason := run.stopper.asked()) is not None:
        run.leaving = True
        run.tracker.note(f"{reason}: this run ends after step {run.step}")
    return run.leaving


# The watchdog limit that applies to each phase. Other phases have no limit, or contain waits with limits of their own.
LIMITED: Mapping[str, Kind] = {
    "drain": "generation",
    "logprobs": "training",
    "policy_training": "training",
    "weight_sync": "weight_sync",
    "checkpointing": "checkpoint",
}


class Stopwatch:
    """Measures the seconds that each phase of a step takes, and registers the phase with the watchdog while it runs."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        with waiting("training loop", on=phase, kind=LIMITED.get(phase, "")):
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
                if run.algorithm.recorded
                else {"performance/generation_tokens_per_sec": sampled / max(self.seconds["generation"], 1e-9)}
            ),
            "performance/training_tokens_per_sec": len(batch.tokens) / max(self.seconds["policy_training"], 1e-9),
        }
