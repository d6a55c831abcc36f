"""The training loop: collect groups, give credit, fill columns, update, publish, release; then store, validate, save and log.

All training goes through it: synchronous and asynchronous, every algorithm and every backend. The stream decides how far rollouts may run
ahead (``strop.rollouts.stream``); the components of the run decide on which devices they run.
"""

from __future__ import annotations

from strop.data.packing import pack
from strop.data.rollout_selector import map_policies
from strop.rollouts.stream import EndOfTasks
from strop.trainer.cadence import after_step, finish_without_tasks, start
from strop.trainer.dropped import check_drop_limits, count_failures, drop_reason
from strop.trainer.publish import publish, yield_device
from strop.trainer.run import TrainingRun
from strop.trainer.update import update
from strop.types import Group


async def train(run: TrainingRun) -> None:
    """Train until the last step, the last task, early stopping or a stop request."""
    await start(run)
    while run.ending is None:
        groups = await collect(run)
        if len(groups) < run.options.groups_per_step:
            return await finish_without_tasks(run, len(groups))
        groups = [part for group in groups for part in group.by_role()]  # one for each trained role
        await yield_device(run)
        with run.timer.span("packing"):
            credit = run.algorithm.group_credit(groups)  # rewards, advantages and mask of each rollout
            batch = pack(groups, credit, share_prefixes=run.options.share_prefixes)
        with run.timer.span("logprobs"):
            batch = await run.columns.fill(batch, groups)  # log-probabilities of reference and teacher, values
        batch = map_policies(batch, run.algorithm.token_credit)  # GAE, KL in the reward, whitening
        result = await update(run, batch)
        run.step += 1
        published = await publish(run)
        run.stream.release(run.options.groups_per_step)
        await after_step(run, groups, batch, result, published)


async def collect(run: TrainingRun) -> list[Group]:
    """Collect the groups of a step. Raises TooManyDropped.

    Groups that failed, cannot be scored, are too old or do not pass the algorithm's filter are dropped, and their slots are released at
    once. There are fewer groups than a step needs only if no tasks are left.
    """
    run.begin_step()
    kept: list[Group] = []
    with run.timer.span("generation"):
        while len(kept) < run.options.groups_per_step:
            run.tracker.progress(f"{run.collecting}: {len(kept)} of {run.options.groups_per_step} groups")
            try:
                group = (await run.stream.next()).leave_out_failed()
            except EndOfTasks:
                break
            reason = drop_reason(run, group)
            if reason is None:
                kept.append(group)
            else:
                run.collected.dropped.append((group, reason))
                run.stream.release(1)
            count_failures(run, group, reason)
            check_drop_limits(run, len(kept))
        staleness = max((run.step - group.version for group in kept), default=0)
        if staleness > run.options.max_staleness and not run.algorithm.recorded_data:
            raise AssertionError(f"a group is {staleness} steps old; the stream allows {run.options.max_staleness}")
    return kept
