"""What happens around the steps: at the start, after each step, and when no tasks are left.

Notifies the listeners, validates, decides whether the run ends, saves and logs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from strop import metrics
from strop.checkpointing.base import RunState
from strop.learner.budget.device_memory import trim_freed_memory
from strop.learner.client import InlineCaller
from strop.metrics import Metrics
from strop.monitoring.trackers.base import SavedCheckpoint
from strop.rollouts.stream import StreamState
from strop.storage.files import StorageError
from strop.trainer.dropped import describe_drops
from strop.trainer.listeners import StepView, UpdateResult
from strop.trainer.run import TooFewTasks, TrainingRun
from strop.trainer.step_metrics import group_metrics, progress_metrics
from strop.types import Batch, Group


async def start(run: TrainingRun) -> None:
    """Publish the weights, validate them if due and log the metrics as step 0. Raises if there is nothing to train on."""
    await run.weights.publish(run.step)
    check_stop_request(run)
    await run.listeners.on_start(run.step, run.tracker)
    if run.options.val_at_start and run.step == 0 and run.evaluator is not None and run.ending is None:
        with run.timer.span("validation"):
            validated = await run.evaluator.evaluate(run.step, run.tracker)
        run.tracker.log(0, validated)
        check_stop_request(run)
    if run.step >= run.options.max_steps or (run.early_stop is not None and run.early_stop.reason is not None):
        run.ending = "finished"


async def after_step(run: TrainingRun, groups: Sequence[Group], batch: Batch, result: UpdateResult, published: Metrics) -> None:
    """Notify the listeners, validate if due, check for the end of the run, save if due, and log the metrics. Raises EndRun."""
    step = view_step(run, groups, batch, result, published)
    with run.timer.span("storing"):
        run.last_metrics = await run.listeners.on_step(step)
    check_ending(run, run.last_metrics)
    with run.timer.span("validation"):
        check_ending(run, await validate_if_due(run))
    with run.timer.span("checkpointing"):
        await save_if_due(run, run.stream.state())
    await log_step(run, step)
    run.listeners.check()
    trim_freed_memory(run.step)


def view_step(run: TrainingRun, groups: Sequence[Group], batch: Batch, result: UpdateResult, published: Metrics) -> StepView:
    recorded = bool(run.algorithm.recorded_data)
    staleness = [] if recorded else [run.step - 1 - group.version for group in groups]
    collected = group_metrics(groups, run.collected.dropped, staleness, recorded=recorded)
    progress = progress_metrics(run.last_metrics, result.metrics, groups, run.options.tasks_per_epoch)
    return StepView(
        step=run.step,
        groups=groups,
        dropped=tuple(run.collected.dropped),
        batch=batch,
        result=result,
        metrics={**collected, **result.metrics, **metrics.to_floats(published), **progress},
        timer=run.timer,
        tracker=run.tracker,
    )


async def log_step(run: TrainingRun, step: StepView) -> None:
    """Log the metrics of a step, with its times."""
    timing = run.timer.metrics(tokens_read=len(step.batch.tokens), tokens_sampled=count_sampled(run, step))
    run.tracker.log(run.step, await run.listeners.on_log(replace(step, metrics={**run.last_metrics, **timing})))
    announce_checkpoint(run)


def count_sampled(run: TrainingRun, step: StepView) -> int | None:
    """Count the tokens the engines sampled for a step, including those dropped or left out; None for recorded data."""
    if run.algorithm.recorded_data:
        return None
    unused = [rollout for group, _ in step.dropped for rollout in group.every_rollout]
    unused += [rollout for group in step.groups for rollout in group.left_out]
    return len(step.batch.target) + sum(rollout.sampled_tokens for rollout in unused)


async def finish_without_tasks(run: TrainingRun, left_over_groups: int) -> None:
    """Validate, save and log as after the last step, because no tasks are left. Raises TooFewTasks if no step was trained.

    The checkpoint stores the stream's state from before the leftover tasks were started, so that a run with more epochs trains on them.
    """
    dropped = f"; {len(run.collected.dropped)} groups were dropped:{describe_drops(run)}" if run.collected.dropped else ""
    if run.step == 0:
        raise TooFewTasks(
            f"the tasks are used up and nothing was trained: {left_over_groups} groups are left, and one step needs "
            f"{run.options.groups_per_step} ({run.options.batch_key}). Add data, allow more epochs "
            f"({run.options.section}.max_num_epochs; null is unbounded), or lower {run.options.batch_key}{dropped}"
        )
    section, last = run.options.section, run.options.max_steps
    before = f" before {section}.max_num_steps={last}" if run.step < last < 1_000_000 else ""
    step_needs = f"{run.options.batch_key}={run.options.groups_per_step}"
    left_over = f"; the {left_over_groups} left over are too few for another step ({step_needs})" if left_over_groups else ""
    run.tracker.note(
        f"{section}.max_num_epochs ended the run after step {run.step}{before}: all tasks are used{left_over}{dropped}"
    )
    run.ending = "finished"
    already_validated = any(name.startswith("validation/") for name in run.last_metrics)
    validated = {} if already_validated else await validate_if_due(run)
    if run.saved.step < run.step:
        assert run.collected.stream is not None
        await save_if_due(run, run.collected.stream)
    if validated:
        run.tracker.log(run.step, validated)


async def validate_if_due(run: TrainingRun) -> dict[str, float]:
    """Validate the policy if due after this step. Returns the metrics (also logged with the step), empty if not due."""
    options = run.options
    periodic = options.val_period and run.step % options.val_period == 0 and run.step >= options.val_start_at
    last = options.val_at_end and run.ending == "finished"
    if run.evaluator is None or not (periodic or last):
        return {}
    validated = await run.evaluator.evaluate(run.step, run.tracker)
    run.last_metrics = {**run.last_metrics, **validated}
    return validated


async def save_if_due(run: TrainingRun, stream: StreamState) -> None:
    """Save a checkpoint with this state of the stream, if due after this step or because the run ends.

    If the file system refuses it, training goes on, and the next step tries again. Raises StorageError if the run ends, or trains on ranks
    in other processes.
    """
    if run.checkpoints is None or not is_save_due(run):
        return
    run.tracker.progress("saving a checkpoint")
    state = RunState(
        step=run.step,
        stream=stream,
        logged=run.last_metrics,
        early_stop=run.early_stop,
        listeners=await run.listeners.state_dict(run.tracker),
    )
    try:
        path = run.checkpoints.save(state, run.saved_parts)
    except StorageError as error:
        run.saved.failed = True
        if not all(isinstance(getattr(learner, "caller", None), InlineCaller | None) for learner in run.learners.values()):
            raise  # ranks in other processes may wait for one that failed
        if run.ending is None:
            run.tracker.note(f"warning: {error}. Training goes on, and the next step is saved instead")
            run.last_metrics = {**run.last_metrics, "train/checkpoint_failed": 1.0}
            return
        path = run.checkpoints.save(state, run.saved_parts)  # the error may be of an earlier save, in the background
    run.saved.step, run.saved.failed = run.step, False
    run.saved.unannounced = SavedCheckpoint(step=run.step, folder=path.absolute())
    run.tracker.note(f"checkpoint: {path}" if path.exists() else f"checkpoint, written in the background: {path}")


def announce_checkpoint(run: TrainingRun) -> None:
    """Report the newest checkpoint to the trackers once it is complete on disk. A background save completes some steps later."""
    if run.saved.unannounced is not None and run.saved.unannounced.folder.exists():
        run.tracker.log_checkpoint(run.saved.unannounced)
        run.saved.unannounced = None


def is_save_due(run: TrainingRun) -> bool:
    period = run.options.save_period
    due = bool(period) and (run.step % period == 0 or run.saved.failed or run.ending is not None)
    return due and run.checkpoints is not None


def check_ending(run: TrainingRun, logged: Mapping[str, float]) -> None:
    """Set ``run.ending`` if this was the last step, if the metrics stop the run early or if a stop was requested, and log the reason."""
    check_stop_request(run)
    if run.step >= run.options.max_steps:
        run.ending = "finished"
    if run.early_stop is None:
        return
    previous, run.early_stop = run.early_stop, run.early_stop.update(logged)
    if run.early_stop.reason is not None and run.early_stop is not previous:
        run.tracker.note(f"{run.early_stop.reason}: training ends")
        run.ending = "finished"


def check_stop_request(run: TrainingRun) -> None:
    """Stop the run if a stop was requested, and log it once. A stopped run skips the validation after the last step."""
    if not run.stop_request.noted and (reason := run.stop_request.check()) is not None:
        run.stop_request.noted = True
        run.ending = run.ending or "stopped"
        run.tracker.note(f"{reason}: this run ends after step {run.step}")
