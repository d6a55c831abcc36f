"""Options and plans that make no sense are refused with the reason, and those that make sense are not."""

from __future__ import annotations

from typing import Any

import pytest

from strop.algorithm_factory import all_algorithms, all_parts
from strop.algorithms.base import Plan
from strop.algorithms.critic import Gae
from strop.algorithms.kl import Kl
from strop.extensions.distillation.distillation import ReverseKl
from support.each import each

PLAN = Plan(group_size=4)
SEVERAL = Plan(group_size=4, optimizer_steps=2)
ALONE = Plan(group_size=1)
OLD = Plan(group_size=4, max_staleness=4, optimizer_steps=2)


def part(name: str, **options: Any) -> Any:
    return all_parts()[name](**options)


def problems(name: str, options: dict[str, Any], plan: Plan) -> list[str]:
    return list(all_algorithms()[name](**options).validate(plan))


TIS, MASK, SHAPED = (part("tis"),), part("divergence_mask"), part("soft_overlong")
TWO_REWARDS = part("decoupled_rewards", weights={"a": 1, "b": 1})
REWARDS_OF_OTHERS = Plan(group_size=4, environment_rewards=("correct", "format"))

REFUSED_PLANS: list[tuple[str, dict[str, Any], Plan, str]] = [
    ("grpo", {}, ALONE, "raise num_generations_per_prompt"),
    ("grpo", {"aggregation": "constant_length"}, PLAN, "constant_length"),
    ("grpo", {"objective": part("sequence_clip")}, PLAN, "gives long rollouts more weight"),
    ("grpo", {"corrections": (part("importance"), *TIS)}, PLAN, "keep one of them"),
    ("grpo", {"corrections": (*TIS, part("icepop"))}, PLAN, "each multiply by the ratio of learner to sampler"),
    ("grpo", {"corrections": TIS, "ratio_to": "sampler"}, PLAN, "count twice"),
    ("grpo", {"objective": MASK, "corrections": TIS}, PLAN, "count twice"),
    ("grpo", {"objective": MASK, "on_policy_ratio": True}, PLAN, "change nothing"),
    ("grpo", {"on_policy_ratio": True, "ratio_to": "between"}, PLAN, "set only one of them"),
    ("grpo", {"on_policy_ratio": True}, SEVERAL, "one optimizer step per batch"),
    ("grpo", {"objective": part("covariance_kl")}, PLAN, "the term has no effect"),
    ("grpo", {"objective": part("covariance_kl"), "on_policy_ratio": True, "ratio_to": "learner"}, PLAN, "the term has no effect"),
    ("grpo", {"proximal_weight": -0.1}, PLAN, "proximal_weight"),
    ("grpo", {"drop_constant_groups": True}, ALONE, "dynamic sampling"),
    ("grpo", {"advantage_low": 1.0, "advantage_high": -1.0}, PLAN, "empty"),
    ("grpo", {"entropy_target": 1.0}, PLAN, "so it has no effect"),
    ("grpo", {"advantage": part("greedy_baseline"), "kl": Kl(place="reward")}, PLAN, "token_reward"),
    ("grpo", {"advantage": TWO_REWARDS, "shaping": SHAPED}, PLAN, "remove the shaping"),
    ("kl_cov", {}, PLAN, "the term has no effect"),
    ("dr_grpo", {}, PLAN, "constant_length"),
    ("gmpo", {"aggregation": "token_mean"}, PLAN, "sequence_mean"),
    ("opo", {}, ALONE, "group size is 1"),
    ("rloo", {}, ALONE, "group size is 1"),
    ("reinforce_pp_baseline", {}, ALONE, "group size is 1"),
    ("reinforce", {"on_policy_ratio": True}, PLAN, "has no ratio"),
    ("reinforce", {"ratio_to": "sampler"}, PLAN, "has no ratio"),
    ("dppo", {"ratio_to": "sampler"}, PLAN, "change nothing"),
    ("decoupled_ppo", {"ratio_to": "between", "proximal_weight": 1.5}, PLAN, "proximal_weight"),
    ("maxrl", {"shaping": SHAPED}, PLAN, "SoftOverlong"),
    ("maxrl", {"kl": Kl(place="reward")}, PLAN, "KL term"),
    ("pass_at_k", {"advantage": part("best_of_k", k=9)}, Plan(group_size=8), "9"),
    ("pass_at_k", {"advantage": part("best_of_k", analytic=True)}, Plan(group_size=8), "8"),
    ("gdpo", {}, REWARDS_OF_OTHERS, "0 rewards have a weight"),
    ("gdpo", {"advantage": part("decoupled_rewards", weights={"correct": 1.0})}, REWARDS_OF_OTHERS, "choose grpo"),
    ("gdpo", {"advantage": part("decoupled_rewards", weights={"correct": 1, "formatt": 1})}, REWARDS_OF_OTHERS, "formatt"),
    ("gdpo", {"advantage": part("decoupled_rewards", weights=(1, 2, 3))}, REWARDS_OF_OTHERS, "a reward for each of 3 weights"),
    ("distillation", {"kl": Kl(weight=0.1, place="token_reward")}, PLAN, "put it in the loss"),
    ("distillation", {"kl": Kl(weight=0.1, place="reward")}, PLAN, "put it in the loss"),
    ("distillation", {"drop_constant_groups": True}, PLAN, "rewards that have no weight in the loss"),
    ("topk_distillation", {"mixed_kl_weight": 1.5}, PLAN, "mixed_kl_weight is 1.5"),
    ("topk_distillation", {"kl_type": "jsd", "beta": 0.0}, PLAN, "beta is 0.0"),
    ("topk_distillation", {"kl_type": "jsd", "beta": 1.0}, PLAN, "beta is 1.0"),
    ("topk_distillation", {"aggregation": "constant_length"}, PLAN, "constant_length"),
    ("ppo", {"value_scale": 0.0}, ALONE, "value_scale is 0.0"),
    ("ppo", {"value_clip": 0.0}, ALONE, "value_clip is 0.0"),
    ("ppo", {"drop_constant_groups": True}, ALONE, "group of one"),
    ("distillation", {"advantage": ReverseKl(reward_weight=-1.0)}, PLAN, "reward_weight is -1.0"),
    ("distillation", {"advantage": ReverseKl(reward_weight=1.0, reward=part("group_relative"))}, ALONE, "the group size is 1"),
]  # fmt: skip

ACCEPTED_PLANS: list[tuple[str, dict[str, Any], Plan]] = [
    ("grpo", {}, PLAN),
    ("grpo", {"advantage": part("group_relative", baseline=False, normalize=False)}, ALONE),
    ("grpo", {"corrections": TIS, "ratio_to": "between"}, SEVERAL),
    ("grpo", {"corrections": (*TIS, part("geometric_rejection"), part("opsm"), part("kpop"))}, PLAN),
    ("grpo", {"kl": Kl(place="token_reward"), "advantage": part("greedy_baseline")}, ALONE),
    ("grpo", {"objective": part("sequence_clip"), "aggregation": "sequence_sum"}, SEVERAL),
    ("grpo", {"objective": part("clip", dual=3.0), "entropy_bonus": 0.01, "entropy_target": 0.3}, SEVERAL),
    ("grpo", {"kl": Kl(weight=0.0, place="reward"), "advantage": part("greedy_baseline")}, PLAN),
    ("kl_cov", {}, SEVERAL),
    ("kl_cov", {"ratio_to": "sampler"}, OLD),
    ("reinforce", {}, ALONE),
    ("reinforce", {"corrections": (part("importance"),)}, OLD),
    ("reinforce_pp", {}, ALONE),
    ("remax", {}, ALONE),
    ("remax", {"drop_constant_groups": True}, ALONE),
    ("decoupled_ppo", {"ratio_to": "between", "proximal_weight": 0.25}, OLD),
    ("maxrl", {"kl": Kl(place="loss")}, PLAN),
    ("pass_at_k", {"advantage": part("best_of_k", k=4, analytic=True)}, Plan(group_size=8)),
    ("gdpo", {"advantage": TWO_REWARDS}, PLAN),  # names that a plan does not know are not known to be wrong
    ("gdpo", {"advantage": part("decoupled_rewards", weights=(1, 2))}, REWARDS_OF_OTHERS),
    ("gdpo", {"advantage": part("decoupled_rewards", weights=None)}, REWARDS_OF_OTHERS),
    ("distillation", {}, ALONE),
    ("topk_distillation", {}, Plan(group_size=1, max_staleness=3)),
    ("ppo", {"kl": Kl(weight=0.1, place="token_reward")}, Plan(group_size=1, optimizer_steps=4, max_staleness=1)),
]

REFUSED_OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("mis", {"low": 2.0, "high": 1.0}, r"w is kept in \[2.0, 1.0\]"),
    ("mis", {"low": -1.0, "high": 1.0}, "which contains no ratio of probabilities"),
    ("icepop", {"high": 0.2}, r"\[0.5, 0.2\]"),
    ("sequence_mask_tis", {"high": 0.5}, r"the geometric mean of w is kept in \[0.999, 0.5\]"),
    ("sequence_mask_tis", {"cap": 0.0}, "cap is 0.0"),
    ("tis", {"cap": 0.0}, "the cap must be above 0"),
    ("tis", {"cap": 1.0, "floor": 1.5}, "or above the cap"),
    ("geometric_rejection", {"low": 1.2}, r"the geometric mean of w is kept in \[1.2, 1.001\]"),
    ("k3_rejection", {"cap": 0.0}, "every other rollout would be dropped"),
    ("opsm", {"delta": -0.1}, "delta is -0.1"),
    ("kpop", {"phi": 0.0}, "phi is 0.0"),
    ("divergence_rejection", {"high": 0.0}, "k3 is never negative"),
    ("divergence_rejection", {"low": 0.5}, "k3 is never negative"),
    ("divergence_rejection", {"estimator": "k1"}, r"where sampler and learner agree exp\(k1\) is 1, and would be rejected"),
    ("divergence_rejection", {"estimator": "k1", "low": 2.0, "high": 1.0}, "contains no ratio of probabilities"),
    ("divergence_rejection", {"estimator": "k1", "level": "max", "low": 0.5, "high": 2.0}, "k1 has both signs"),
    ("cispo", {"low": 1.5}, "low must lie in"),
    ("covariance_clip", {"share": 0.0}, "share must lie"),
    ("covariance_clip", {"share": 1.5}, "share must lie"),
    ("covariance_clip", {"lowest": 5.0, "highest": 5.0}, "share must lie"),
    ("divergence_mask", {"low": -0.1}, "must lie|at least"),
    ("divergence_mask", {"high": 1.5}, "must lie|at least"),
    ("divergence_mask", {"cap": 0.5}, "must lie|at least"),
    ("geometric_mean", {"low": -0.1}, "negative"),
    ("second_moment_mask", {"limit": 0.0}, "masks all"),
    ("soft_gate", {"tau_negative": 0.0}, "above 0"),
    ("top_entropy", {"share": 0.0}, "must lie in"),
    ("gamma_weight", {"lambda_positive": 0.0}, "no bound"),
    ("best_of_k", {"k": 1}, "at least 2"),
    ("soft_overlong", {"buffer": 0}, "set|must"),
    ("soft_overlong", {"penalty": -1.0}, "set|must"),
    ("soft_overlong", {"buffer": 50, "max_length": 40}, "set|must"),
    ("soft_overlong", {"truncated_factor": 1.5}, "set|must"),
    ("dpo", {"beta": 0.0}, "beta is 0.0: it must be above 0"),
    ("simpo", {"beta": -1.0}, "beta is -1.0"),
    ("simpo", {"gamma": -0.1}, "gamma is -0.1"),
    ("cdpo", {"label_smoothing": 0.5}, "below 0.5, at which labels contain no information"),
    ("robust_dpo", {"label_smoothing": -0.1}, "label_smoothing is -0.1"),
    ("dpo", {"preference_weight": 0.0}, "at least one must be above 0"),
    ("dpo", {"sft_weight": -1.0}, "neither may be negative"),
    ("kto", {"undesirable_weight": 0}, "undesirable_weight is 0"),
    ("reward_model", {"centering": -0.1}, "a negative weight drives scores away from 0"),
    ("reward_model", {"kind": "regression", "use_margin": True}, "apply to pairs, but kind regression fits single scores"),
    ("gae", {"gamma": 1.1}, "gamma is 1.1"),
    ("gae", {"lambda_policy": -0.1}, "lambda_policy is -0.1"),
    ("gae", {"lambda_value": 2.0}, "lambda_value is 2.0"),
    ("gae", {"length_adaptive_alpha": -1.0}, "length_adaptive_alpha is -1.0"),
]


@each("name, options, plan, said", REFUSED_PLANS)
def test_a_plan_that_an_algorithm_cannot_follow_is_refused_with_the_reason(
    name: str, options: dict[str, Any], plan: Plan, said: str
) -> None:
    found = problems(name, options, plan)
    assert any(said in problem for problem in found), found


@each("name, options, plan", ACCEPTED_PLANS)
def test_a_plan_that_makes_sense_is_not_refused(name: str, options: dict[str, Any], plan: Plan) -> None:
    assert problems(name, options, plan) == []


@each("name, options, said", REFUSED_OPTIONS)
def test_an_option_that_makes_no_sense_is_refused_when_it_is_set(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        {**all_algorithms(), **all_parts(), "gae": Gae}[name](**options)
