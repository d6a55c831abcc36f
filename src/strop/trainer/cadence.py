"""What happens around the steps: at the start, after each step, and when no tasks are left.

Stores rollouts, validates, decides whether the run ends, saves and logs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strop import metrics
from strop.algorithms.base import TokenOutputs
from strop.checkpointing.base import RunState
from strop.learner.base import require_token_outputs
from strop.learner.client import InlineCaller
from strop.learner.throughput import TrainingPasses
from strop.metrics import Metrics
from strop.monitoring.rollout_store.rollout_record import RolloutRecord, list_images, make_records, split_by_rollout
from strop.monitoring.trackers.media import SavedCheckpoint
from strop.monitoring.trackers.rollout_media import make_step_media
from strop.rollouts.stream import StreamState
from strop.storage.storage_error import StorageError
from strop.trainer.dropped import describe_drops
from strop.trainer.run import TooFewTasks, TrainingRun
from strop.trainer.step_metrics import group_metrics, progress_metrics
from strop.trainer.update import UpdateResult
from strop.types import Batch, Group


async def start(run: TrainingRun) -> None:
    """Publish the weights, validate them if due and log the metrics as step 0. Find out whether there is anything to train."""
    await run.weights.publish(run.step)
    check_stop_request(run)
    run.health.start(run.tracker)
    run.monitor.check_stop()  # a run that was stopped for its alarm is not continued
    if run.options.val_at_start and run.step == 0 and run.evaluator is not None and run.ending is None:
        run.tracker.log(0, await run.evaluator.evaluate(run.step, run.tracker))
        check_stop_request(run)
    if run.step >= run.options.max_steps or (run.early_stop is not None and run.early_stop.reason is not None):
        run.ending = "finished"


async def after_step(run: TrainingRun, groups: Sequence[Group], batch: Batch, result: UpdateResult, published: Metrics) -> None:
    """Store the rollouts of the step; validate, end the run and save, where due; log the metrics."""
    recorded = bool(run.algorithm.recorded_data)
    with run.timer.span("storing"):
        run.rollouts.write_images(() if recorded else list_images([*groups, *(group for group, _ in run.dropped)]))
        records = make_step_records(run, groups, batch, result)
        run.rollouts.write(run.step, records, result.tokens)
        show_rollouts(run, records)
    staleness = [] if recorded else [run.step - 1 - group.version for group in groups]
    collected = group_metrics(groups, run.dropped, staleness, recorded=recorded)
    progress = progress_metrics(run.last_metrics, result.metrics, groups, run.options.tasks_per_epoch)
    run.last_metrics = {**collected, **result.metrics, **metrics.to_floats(published), **progress}
    run.last_metrics = {**run.last_metrics, **run.health.check(run.last_metrics, run.tracker)}
    run.last_metrics = {**run.last_metrics, **await run.monitor.after_step(run.step, groups, run.tracker)}
    run.rollouts.flag(run.monitor.flags)
    check_ending(run, run.last_metrics)
    with run.timer.span("validation"):
        validated = await validate_if_due(run)
    run.last_metrics = {**run.last_metrics, **validated}
    check_ending(run, validated)
    with run.timer.span("checkpointing"):
        if is_save_due(run):
            await run.monitor.settle()  # its state has the grades of this step
        save_if_due(run, run.stream.state())
    if run.save_failed:
        run.last_metrics = {**run.last_metrics, "train/checkpoint_failed": 1.0}
    sampled = len(batch.target) + sum(rollout.sampled_tokens for group, _ in run.dropped for rollout in group.rollouts)
    sampled += sum(rollout.sampled_tokens for group in groups for rollout in group.unscored)
    timing = run.timer.metrics(tokens_read=len(batch.tokens), tokens_sampled=None if recorded else sampled)
    await run.profiler.finish(run.step, run.timer.started, run.timer.ended)
    if run.throughput is not None:
        timing |= run.throughput.metrics(batch, describe_passes(run, batch), timing)
    run.tracker.log(run.step, {**run.last_metrics, **timing, **run.read_machines()})
    announce_checkpoint(run)
    run.health.check_skipped()
    run.monitor.check_stop()


def show_rollouts(run: TrainingRun, records: Sequence[RolloutRecord]) -> None:
    """Hand histograms of the step's rollouts, and a table of some where due, to the services."""
    if run.options.tracked_samples is None or not records or run.algorithm.recorded_data:
        return
    samples = run.options.tracked_samples if run.step % run.options.tracked_samples_period == 0 or run.step == 1 else 0
    run.tracker.log_media(run.step, make_step_media(records, run.rollouts.images, samples=samples))


def describe_passes(run: TrainingRun, batch: Batch) -> TrainingPasses:
    """Describe what this step's update did with the policy: ``update`` read the batch before where it took several optimizer steps."""
    trained = "policy" in run.algorithm.losses(run.step - 1)
    return TrainingPasses(
        epochs=run.options.update_epochs if trained else 0,
        scored_before=not trained or run.options.steps_per_batch * run.options.update_epochs > 1,
        zero_gradient=run.algorithm.zero_gradient(batch, "policy"),
    )


async def finish_without_tasks(run: TrainingRun, left_over_groups: int) -> None:
    """Validate, save and log as after the last step, because no tasks are left. Raises TooFewTasks if no step was trained.

    The checkpoint stores the stream's state from before the leftover tasks were started, so that a run with more epochs trains on them.
    """
    dropped = f"; {len(run.dropped)} groups were dropped:{describe_drops(run)}" if run.dropped else ""
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
    run.last_metrics = {**run.last_metrics, **validated}
    if run.saved_step < run.step:
        assert run.stream_state is not None
        save_if_due(run, run.stream_state)
    if validated:
        run.tracker.log(run.step, validated)


def make_step_records(run: TrainingRun, groups: Sequence[Group], batch: Batch, result: UpdateResult) -> list[RolloutRecord]:
    """Make the records to store of this step's rollouts, including dropped ones; of recorded data, which is stored already, only if
    the columns of its tokens are."""
    if run.algorithm.recorded_data and result.tokens is None:
        return []
    outputs = result.old_outputs
    of_tokens = isinstance(outputs, TokenOutputs) and run.algorithm.predict == "tokens"
    credit = split_by_rollout(batch.advantages, batch, groups)
    return make_records(
        run.step,
        [*groups, *(group for group, _ in run.dropped)],
        advantages={key: float(column.mean()) for key, column in credit.items() if len(column)},
        learner_logprobs=split_by_rollout(require_token_outputs(outputs).logprobs, batch, groups) if of_tokens else {},
        dropped={group.index: reason for group, reason in run.dropped},
        decode=run.decode,
        routes=run.options.stored_routes,
    )


async def validate_if_due(run: TrainingRun) -> dict[str, float]:
    """Validate the policy, if due after this step, and return the metrics; empty if not due."""
    options = run.options
    periodic = options.val_period and run.step % options.val_period == 0 and run.step >= options.val_start_at
    last = options.val_at_end and run.ending == "finished"
    if run.evaluator is None or not (periodic or last):
        return {}
    return await run.evaluator.evaluate(run.step, run.tracker)


def save_if_due(run: TrainingRun, stream: StreamState) -> None:
    """Save a checkpoint with this state of the stream, if due after this step or because the run ends.

    If the file system refuses it, training goes on, and the next step tries again. Raises StorageError if the run ends, or trains on ranks
    in other processes.
    """
    if run.checkpoints is None or not is_save_due(run):
        return
    run.tracker.progress("saving a checkpoint")
    state = RunState(
        step=run.step, stream=stream, logged=run.last_metrics, early_stop=run.early_stop, monitor=run.monitor.state()
    )
    try:
        path = run.checkpoints.save(state, run.saved_parts)
    except StorageError as error:
        run.save_failed = True
        if not all(isinstance(getattr(learner, "caller", None), InlineCaller | None) for learner in run.learners.values()):
            raise  # ranks in other processes may wait for one that failed
        if run.ending is None:
            run.tracker.note(f"warning: {error}. Training goes on, and the next step is saved instead")
            return
        path = run.checkpoints.save(state, run.saved_parts)  # the error may be of an earlier save, in the background
    run.saved_step, run.save_failed = run.step, False
    run.unannounced = SavedCheckpoint(step=run.step, folder=path.absolute())
    run.tracker.note(f"checkpoint: {path}" if path.exists() else f"checkpoint, written in the background: {path}")


def announce_checkpoint(run: TrainingRun) -> None:
    """Tell the trackers of the newest checkpoint once it is whole on disk: one that is written beside training is so later."""
    if run.unannounced is not None and run.unannounced.folder.exists():
        run.tracker.log_checkpoint(run.unannounced)
        run.unannounced = None


def is_save_due(run: TrainingRun) -> bool:
    period = run.options.save_period
    due = bool(period) and (run.step % period == 0 or run.save_failed or run.ending is not None)
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
    """Stop the run if that was requested, and log it once. A run that is stopped is not validated as after its last step."""
    if not run.stop_noted and (reason := run.stop_request.check()) is not None:
        run.stop_noted = True
        run.ending = run.ending or "stopped"
        run.tracker.note(f"{reason}: this run ends after step {run.step}")
