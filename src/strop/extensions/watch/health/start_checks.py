"""What can be known to be wrong before a run starts: it works, but most likely not as intended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from strop.algorithms.policy_gradient.advantages.gdpo import DecoupledRewards
from strop.config import RolloutRunConfig
from strop.environments.rewards import RewardMark
from strop.extensions.watch.health.health_rules import HealthFinding
from strop.runs.dry_run.examine import find_single_turns
from strop.runs.monitors.run_listeners import RunSetup
from strop.runs.rollout_run import SampledSource
from strop.runs.tasks import list_reward_marks
from strop.trainer.run import TrainOptions

UNLIMITED_STEPS = 1_000_000  # from here on, a number of steps is no limit that somebody chose


def find_at_start(setup: RunSetup) -> Iterator[HealthFinding]:
    """Yield what is wrong with a run whose options are known."""
    config, source = setup.config, setup.source
    if isinstance(config, RolloutRunConfig) and isinstance(source, SampledSource):
        environments = {component.name: component.environment for component in source.train.components}
        for message in find_single_turns(environments, config.rollout_training.max_rollout_turns, config.section):
            yield HealthFinding("single_turn", message)
        advantage = getattr(setup.algorithm, "advantage", None)
        if isinstance(advantage, DecoupledRewards):
            weights = advantage.weights if isinstance(advantage.weights, Mapping) else {}
            yield from check_reward_weights(list_reward_marks(config), weights, "algorithm.kwargs.advantage.weights")
    yield from check_validation(source.options, source.size, held_out=bool(config.data.validation_entries))
    yield from check_epochs(source.options, source.size, config.training.max_num_epochs)


def check_reward_weights(
    marks: Mapping[str, Mapping[str, RewardMark]], weights: Mapping[str, float], named: str
) -> Iterator[HealthFinding]:
    """Check that no environment weighs its rewards for an algorithm with its own ``weights``, which are set at the key ``named``."""
    for alias, rewards in marks.items():
        ignored = [described for name, mark in rewards.items() if (described := _describe_ignored(name, mark, weights))]
        if ignored:
            yield HealthFinding(
                "ignored_weights",
                f"env.{alias} has {'; '.join(ignored)}, but this algorithm normalizes each reward by itself and weighs it by {named}, so "
                f"that has no effect; set {named}, or choose an algorithm that learns from the sum, such as grpo",
            )


def _describe_ignored(name: str, mark: RewardMark, weights: Mapping[str, float]) -> str:
    """Return what does not reach the algorithm of a reward, empty if nothing is lost."""
    if mark.schedule is not None:
        return f"a schedule for the weight of {name}"
    if mark.weight not in (0.0, 1.0, weights.get(name)):
        return f"the weight {mark.weight:g} for {name}"
    left_out = next((gate.reward for gate in mark.gates if gate.otherwise is None), None)
    return "" if left_out is None else f"a gate that leaves {name} out where {left_out} is low, which counts as 0"


def check_validation(options: TrainOptions, groups: int | None, *, held_out: bool) -> Iterator[HealthFinding]:
    """Check that held-out data is used. ``groups``: all that the run may read, None if unbounded."""
    steps = _count_steps(options, groups)
    first = max(options.val_period, options.val_start_at)
    periodic = options.val_period > 0 and (steps is None or -(-first // options.val_period) * options.val_period <= steps)
    if held_out and not (periodic or options.val_at_start or options.val_at_end):
        why = f"this run has at most {steps} steps" if options.val_period else "val_at_start and val_at_end are false"
        yield HealthFinding(
            "never_validated",
            f"validation data is held out, but never used: {options.section}.val_period is {options.val_period}, and {why}; set "
            f"{options.section}.val_at_end=true or a smaller val_period, or train on these rows too "
            "(data.train.split_validation_size=0, data.validation=null)",
        )


def check_epochs(options: TrainOptions, groups: int | None, max_epochs: int | None) -> Iterator[HealthFinding]:
    steps = None if groups is None else groups // options.groups_per_step
    if steps and max_epochs is not None and steps < options.max_steps < UNLIMITED_STEPS:
        needed = -(-options.max_steps * options.groups_per_step * max_epochs // max(groups or 1, 1))
        yield HealthFinding(
            "epochs_end_first",
            f"{options.section}.max_num_epochs={max_epochs} ends this run after {steps} of {options.section}.max_num_steps="
            f"{options.max_steps} steps, when the data is used up; set {options.section}.max_num_epochs={needed} (or null) for all steps",
            logged=False,
        )


def _count_steps(options: TrainOptions, groups: int | None) -> int | None:
    """Return the largest number of steps of a run; None if it is not limited."""
    limits = [options.max_steps] if options.max_steps < UNLIMITED_STEPS else []
    limits += [] if groups is None else [groups // options.groups_per_step]
    return min(limits, default=None)
