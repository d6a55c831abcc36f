"""Which groups are dropped instead of trained on, and how many may be."""

from __future__ import annotations

from strop.monitoring.rollout_store.rollout_record import DropReason
from strop.trainer.run import TooManyDropped, TrainingRun
from strop.types import Group


def drop_reason(run: TrainingRun, group: Group) -> DropReason | None:
    """Return why a group is dropped; None if it is trained on."""
    if run.options.drop_stale and run.step - group.version > run.options.max_staleness:
        return "stale"
    if group.errors:
        return "error"
    if group.is_unscored:
        return "unscored"
    failed = any(rollout.error is not None for rollout in group.left_out)
    if failed and len(group.rollouts) < min(run.options.min_rollouts, len(group.every_rollout)):
        return "too_few"
    return None if any(map(run.algorithm.keep, group.by_role())) else "filtered"


def count_failures(run: TrainingRun, group: Group, reason: DropReason | None) -> None:
    """Count the groups in a row that were dropped for errors, or in which every rollout failed."""
    if reason == "stale":
        return
    failed = all(rollout.error is not None for rollout in group.rollouts) or reason in ("unscored", "too_few", "error")
    run.collected.errors_in_a_row = run.collected.errors_in_a_row + 1 if failed else 0
    if failed:
        run.collected.last_errors = tuple(each.error for each in group.every_rollout if each.error is not None)


def check_drop_limits(run: TrainingRun, kept: int) -> None:
    """Raise TooManyDropped if too many groups failed in a row, or too few of this step's groups passed the filter."""
    options = run.options
    if run.collected.errors_in_a_row >= options.max_errors_in_a_row:
        raise TooManyDropped(
            f"{run.collected.errors_in_a_row} groups in a row failed ({options.section}.max_errors_in_a_row); the last reasons:"
            f"{describe_drops(run)}"
        )
    if kept >= options.groups_per_step or kept + len(run.collected.dropped) < options.max_groups_per_step:
        return
    dropped = [group for group, reason in run.collected.dropped if reason != "stale"]
    if kept + len(dropped) >= options.max_groups_per_step:
        reward = sum(float(group.rewards.mean()) for group in dropped) / max(len(dropped), 1)
        raise TooManyDropped(
            f"{kept + len(dropped)} groups were generated and only {kept} of the {options.groups_per_step} wanted passed the "
            f"filter; the mean reward of the dropped ones is {reward:.3g}: at the lowest reward, the task is too hard or the reward is "
            f"broken; at the highest, it is too easy. Change the task, or raise {options.section}.dynamic_sampling_max_gen_batches"
        )


def describe_drops(run: TrainingRun) -> str:
    """Describe why groups of this step were dropped, one reason per line.

    First the last three distinct errors, then the number of groups that no reward scored, that did not pass the filter, that were too old.
    """
    failed = (each for group, _ in run.collected.dropped for each in group.every_rollout)
    errors = dict.fromkeys([*(each.error for each in failed if each.error is not None), *run.collected.last_errors])
    reasons = [reason for _, reason in run.collected.dropped]
    counts = {
        "have no reward: a reward returned None for every rollout": reasons.count("unscored"),
        "did not pass the algorithm's filter": reasons.count("filtered"),
        "have fewer rollouts left than failures.min_rollouts": reasons.count("too_few"),
        "were too old": reasons.count("stale"),
    }
    lines = [*list(errors)[-3:], *(f"{count} {description}" for description, count in counts.items() if count)]
    return "".join(f"\n  {line}" for line in lines)
