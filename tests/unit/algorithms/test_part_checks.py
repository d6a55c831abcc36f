"""Compositions of a policy gradient that make no sense are refused with the reason."""

from __future__ import annotations

import pytest

from strop.algorithms.base import Plan
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.advantages.gdpo import DecoupledRewards
from strop.algorithms.policy_gradient.advantages.grpo import GRPO, Clip, GroupRelative
from strop.algorithms.policy_gradient.advantages.remax import GreedyBaseline
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.corrections.importance import Importance
from strop.algorithms.policy_gradient.corrections.truncated import Tis
from strop.algorithms.policy_gradient.objectives.dppo import DivergenceMask
from strop.algorithms.policy_gradient.objectives.gspo import SequenceClip
from strop.algorithms.policy_gradient.objectives.kl_cov import CovarianceKl
from strop.algorithms.policy_gradient.overlong import SoftOverlong

PLAN = Plan(group_size=4)
SEVERAL = Plan(group_size=4, optimizer_steps=2)


@pytest.mark.parametrize(
    ("algorithm", "plan", "said"),
    [
        (GRPO(), Plan(group_size=1), "raise num_generations_per_prompt"),
        (GRPO(aggregation="constant_length"), PLAN, "constant_length"),
        (GRPO(objective=SequenceClip()), PLAN, "gives long rollouts more weight"),
        (GRPO(corrections=(Importance(), Tis())), PLAN, "keep one of them"),
        (GRPO(corrections=(Tis(),), ratio_to="sampler"), PLAN, "count twice"),
        (GRPO(objective=DivergenceMask(), corrections=(Tis(),)), PLAN, "count twice"),
        (GRPO(objective=DivergenceMask(), on_policy_ratio=True), PLAN, "change nothing"),
        (GRPO(on_policy_ratio=True, ratio_to="between"), PLAN, "set only one of them"),
        (GRPO(on_policy_ratio=True), SEVERAL, "one optimizer step per batch"),
        (GRPO(objective=CovarianceKl()), PLAN, "the term has no effect"),
        (GRPO(objective=CovarianceKl(), on_policy_ratio=True, ratio_to="learner"), PLAN, "the term has no effect"),
        (GRPO(proximal_weight=-0.1), PLAN, "proximal_weight"),
        (GRPO(drop_constant_groups=True), Plan(group_size=1), "dynamic sampling"),
        (GRPO(advantage_low=1.0, advantage_high=-1.0), PLAN, "empty"),
        (GRPO(entropy_target=1.0), PLAN, "so it has no effect"),
        (GRPO(advantage=GreedyBaseline(), kl=Kl(place="reward")), PLAN, "token_reward"),
        (GRPO(advantage=DecoupledRewards(weights={"a": 1, "b": 1}), shaping=SoftOverlong()), PLAN, "remove the shaping"),
    ],
)
def test_nonsense_is_refused_with_the_reason(algorithm: PolicyGradient, plan: Plan, said: str) -> None:
    assert any(said in problem for problem in algorithm.validate(plan)), list(algorithm.validate(plan))


@pytest.mark.parametrize(
    ("algorithm", "plan"),
    [
        (GRPO(), PLAN),
        (GRPO(advantage=GroupRelative(baseline=False, normalize=False)), Plan(group_size=1)),
        (GRPO(corrections=(Tis(),), ratio_to="between"), SEVERAL),
        (GRPO(kl=Kl(place="token_reward"), advantage=GreedyBaseline()), Plan(group_size=1)),
        (GRPO(objective=SequenceClip(), aggregation="sequence_sum"), SEVERAL),
        (GRPO(objective=Clip(dual=3.0), entropy_bonus=0.01, entropy_target=0.3), SEVERAL),
        (GRPO(kl=Kl(weight=0.0, place="reward"), advantage=GreedyBaseline()), PLAN),
    ],
)
def test_what_makes_sense_is_not(algorithm: PolicyGradient, plan: Plan) -> None:
    assert list(algorithm.validate(plan)) == []
