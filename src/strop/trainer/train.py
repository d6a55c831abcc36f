"""The training loop: collect groups, fill columns, update, publish, release; then validate, save and log.

All training goes through it: synchronous and asynchronous, every algorithm and every backend. The stream decides how far rollouts may run
ahead (``strop.rollouts.stream``); the components of the run decide on which devices they run.
"""

from __future__ import annotations

from strop import metrics
from strop.data.packing import pack
from strop.rollouts.stream import StreamState
from strop.trainer.cadence import check_early_stop, rollout_records, save_if_due, validate_at_start, validate_if_due
from strop.trainer.collect import collect, describe_drops
from strop.trainer.phase_timer import PhaseTimer
from strop.trainer.run import DrainBefore, Run, TooFewTasks
from strop.trainer.update import update


async def train(run: Run) -> None:
    """Train until the last step, the last task, early stopping or a stop request."""
    await run.weights.publish(run.step)
    await validate_at_start(run)
    while not run.should_stop:
        clock = PhaseTimer()
        stream_state = run.stream.state()
        with clock("generation"):
            groups, logged = await collect(run)
        if len(groups) < run.options.groups_per_step:
            await handle_end_of_tasks(run, len(groups), stream_state)
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
            old_outputs, trained = await update(run, batch)
        with clock("drain"):
            await drain_if_due(run, before="publishing")
        run.step += 1
        with clock("weight_sync"):
            synced = await run.weights.publish(run.step)
        run.stream.release(len(groups))
        with clock("storing"):
            run.rollouts.write(run.step, rollout_records(run, groups, batch, old_outputs))
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
    """Wait for the groups in flight if ``drain_before`` says so. Then all tokens of a rollout have the same weight version."""
    if run.options.drain_before == before:
        run.tracker.progress(f"finishing the groups in flight before {before}")
        await run.stream.drain()


async def handle_end_of_tasks(run: Run, left_over_groups: int, stream_state: StreamState) -> None:
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
    run.tracker.note(
        f"the tasks are used up after step {run.step}: {left_over_groups} groups left over are not trained on{dropped}"
    )
    run.done = True
    already_validated = any(name.startswith("validation/") for name in run.last_metrics)
    validated = {} if already_validated else await validate_if_due(run)
    run.last_metrics = {**run.last_metrics, **validated}
    if run.saved_step < run.step:
        save_if_due(run, stream_state)
    if validated:
        run.tracker.log(run.step, validated)
