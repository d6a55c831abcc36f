"""Names of Strop's metrics in other libraries, so that users of those libraries find them in W&B and TensorBoard.

Only these two trackers show them (``logger.metric_aliases``); ``metrics.jsonl`` has each metric once, under Strop's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Strop's name -> TRL's, with its trainers' prefix. {name} stands for any one part of a name.
TRL: Mapping[str, str] = {
    "train/reward_std_in_group": "train/reward_std",
    "train/groups_without_signal": "train/frac_reward_zero_std",
    "train/rewards/{name}": "train/rewards/{name}/mean",
    "train/mean_gen_tokens_per_sample": "train/completions/mean_length",
    "train/max_gen_tokens_per_sample": "train/completions/max_length",
    "train/truncated": "train/completions/clipped_ratio",
    "train/kl_penalty": "train/kl",
    "train/ratio_clipped": "train/clip_ratio/region_mean",
    "train/lr": "train/learning_rate",
    "train/total_tokens": "train/num_tokens",
    "train/rewards_chosen_mean": "train/rewards/chosen",
    "train/rewards_rejected_mean": "train/rewards/rejected",
    "train/margin": "train/rewards/margins",
    "train/accuracy": "train/rewards/accuracies",
    "train/logprobs_chosen": "train/logps/chosen",
    "train/logprobs_rejected": "train/logps/rejected",
    "validation/loss": "eval/loss",
    "validation/reward": "eval/reward",
    "validation/margin": "eval/rewards/margins",
    "validation/rewards_chosen_mean": "eval/rewards/chosen",
    "validation/rewards_rejected_mean": "eval/rewards/rejected",
}

# Strop's name -> verl's.
VERL: Mapping[str, str] = {
    "train/reward": "critic/score/mean",
    "train/reward_max": "critic/score/max",
    "train/reward_min": "critic/score/min",
    "train/loss": "actor/pg_loss",
    "train/entropy": "actor/entropy",
    "train/kl_penalty": "actor/kl_loss",
    "train/ratio_clipped": "actor/pg_clipfrac",
    "train/grad_norm": "actor/grad_norm",
    "train/lr": "actor/lr",
    "train/value_loss": "critic/vf_loss",
    "train/value_grad_norm": "critic/grad_norm",
    "train/value_lr": "critic/lr",
    "train/explained_variance": "critic/vf_explained_var",
    "train/mean_gen_tokens_per_sample": "response_length/mean",
    "train/max_gen_tokens_per_sample": "response_length/max",
    "train/truncated": "response_length/clip_ratio",
    "train/turns_per_sample": "num_turns/mean",
    "timing/train/generation": "timing_s/gen",
    "timing/train/policy_training": "timing_s/update_actor",
    "timing/train/validation": "timing_s/testing",
    "timing/train/checkpointing": "timing_s/save_checkpoint",
    "timing/train/total_step_time": "timing_s/step",
    "performance/tokens_per_sec": "perf/throughput",
}

_EXACT = {source: [table[source] for table in (TRL, VERL) if source in table] for source in (*TRL, *VERL) if "{" not in source}
_PATTERNS = [
    (re.compile(re.escape(source).replace(r"\{name\}", "([^/]+)")), target.replace("{name}", r"\1"))
    for source, target in TRL.items()
    if "{" in source
]


def add_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics, plus copies under the names of other libraries. Strop's own names win.

    Metrics of a policy's update that recorded-data runs also have are named ``actor/...`` only if there are rollouts.
    """
    sampled = "train/reward" in metrics
    aliased: dict[str, float] = {}
    for name, value in metrics.items():
        targets = [
            *_EXACT.get(name, ()),
            *(pattern.sub(target, name) for pattern, target in _PATTERNS if pattern.fullmatch(name)),
        ]
        aliased |= {target: value for target in targets if sampled or not target.startswith(("actor/", "critic/"))}
    return {**aliased, **metrics}
