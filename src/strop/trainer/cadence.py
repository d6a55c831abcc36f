"""The work after a step: store rollouts, validate, stop, save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strop.algorithms.base import Outputs
from strop.checkpointing.base import RunState
from strop.learner.base import require_token_outputs
from strop.monitoring.rollout_store.rollout_record import RolloutRecord, make_records, split_by_rollout
from strop.rollouts.stream import StreamState
from strop.trainer.run import Run
from strop.types import Batch, Group


def rollout_records(run: Run, groups: Sequence[Group], batch: Batch, old_outputs: Outputs) -> list[RolloutRecord]:
    """Return the records to store of this step's rollouts, including dropped ones; none for recorded data, which is stored already."""
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
    """Validate the policy, if due after this step, and return the metrics; empty if not due."""
    options = run.options
    periodic = options.val_period and run.step % options.val_period == 0 and run.step >= options.val_start_at
    last = options.val_at_end and run.finished
    if run.evaluator is None or not (periodic or last):
        return {}
    return await run.evaluator.evaluate(run.step, run.tracker)


def save_if_due(run: Run, stream: StreamState) -> None:
    """Save a checkpoint with this state of the stream, if due after this step or because the run ends."""
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
    previous, run.early_stop = run.early_stop, run.early_stop.update(logged)
    if run.early_stop.reason is None or run.early_stop is previous:
        return False
    run.tracker.note(f"{run.early_stop.reason}: training ends")
    return True


def check_stop_request(run: Run) -> bool:
    """Return whether a stop was requested, and log it once. The run then ends without the validation that is due after the last step."""
    if not run.stopping and (reason := run.stop_request.check()) is not None:
        run.stopping = True
        run.tracker.note(f"{reason}: this run ends after step {run.step}")
    return run.stopping
