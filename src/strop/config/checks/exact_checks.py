"""Rules about ``policy.exact_on_policy`` and ``policy.deterministic`` that need more than the policy's section."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config.checks.device_counts import count_devices
from strop.config.schema.run_config import RolloutRunConfig, TrainingRunConfig
from strop.problems import Problem


def check_one_process(config: TrainingRunConfig) -> Iterator[Problem]:
    """Shapes are compared in the process that computes with them, and those of sharded weights never are."""
    if not isinstance(config, RolloutRunConfig) or not config.policy.exact_on_policy:
        return
    if count_devices(config).uses_ray:
        yield Problem(
            "policy.exact_on_policy",
            "found true, but this run has its learner in processes of its own (Ray), and only a learner and an engine of one process "
            "are known to agree to the last bit",
            "Set cluster.backend=local on one device, or policy.exact_on_policy=false.",
        )


def check_order_of_events(config: TrainingRunConfig) -> Iterator[Problem]:
    """``policy.deterministic`` is about kernels; the order of events depends on the speed of rollouts."""
    if not isinstance(config, RolloutRunConfig) or not config.policy.deterministic:
        return
    training = config.rollout_training
    key = f"{config.section}.async_{config.section}"
    if training.max_staleness:
        yield Problem(
            "policy.deterministic",
            f"found true, but with {key}.enabled it depends on the speed of rollouts which of them a step trains on",
            f"Train synchronously ({key}.enabled=false), or set policy.deterministic=false.",
        )


def warn_order_of_turns(config: TrainingRunConfig) -> Iterator[Problem]:
    """What the torch engine batches on a GPU depends on when environments answer."""
    if not isinstance(config, RolloutRunConfig) or not config.policy.deterministic:
        return
    policy, training = config.policy, config.rollout_training
    if policy.generation.uses_engines or policy.device == "cpu" or policy.exact_on_policy:
        return
    if training.max_rollout_turns > 1:
        yield Problem(
            "policy.deterministic",
            "on a GPU the last bits of a token depend on what the torch engine batches it with, and so on when environments answer "
            "between turns: two runs are equal only if these answer in the same order",
            "policy.exact_on_policy=true computes a token with the same bits in any batch.",
        )
