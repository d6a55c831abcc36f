"""The training sections (``grpo``, ``ppo``, ``distillation``, ``sft``, ``dpo``, ``rm``) and their losses."""

from __future__ import annotations

from strop.config.recipes.rules import Refused, Rule, Unused

IN_REWARD = "Give the reward in the environment. Remove the key."

TRAINING_RULES: tuple[Rule, ...] = (
    Unused(
        "grpo.adv_estimator.*",
        "grpo.adv_estimator.name chooses it; its options are grpo.normalize_rewards, grpo.use_leave_one_out_baseline, "
        "grpo.minus_baseline and algorithm.kwargs.advantage",
    ),
    Unused("*.val_batch_size", "validation goes through the same engine, which batches by itself"),
    Unused("*.batch_multiplier", "with dynamic sampling, groups are sampled until the batch is full"),
    Refused(("*.seq_logprob_error_threshold",), "it is not in this version", "Remove the key."),
    Refused(("grpo.invalid_tool_call_advantage",), "it is not in this version", IN_REWARD),
    Refused(("grpo.malformed_thinking_advantage",), "it is not in this version", IN_REWARD),
    Refused(("*.async_*.max_generation_failures",), "it is not in this version", "Use max_errors_in_a_row. Remove the key."),
    Refused(("reward_penalties",), "they are not in this version", IN_REWARD),
    Unused("ppo.skip_reference_policy_logprobs_calculation", "they are computed only where a KL term needs them"),
    Refused(("ppo.async_ppo.warmup_generation_lead_steps",), "it is not in this version", "Remove the key."),
    Refused(("ppo.async_ppo.drop_incomplete_targets_on_restore",), "it is not in this version", "Remove the key."),
)
