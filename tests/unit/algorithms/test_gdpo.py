"""GDPO: each reward is normalised by itself before they are added."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.advantages.gdpo import GDPO, DecoupledRewards
from strop.algorithms.policy_gradient.overlong import SoftOverlong
from strop.types import Group
from support.rollouts import make_group, make_rollout, pack_for, sampled_turn

WEIGHTS = {"correct": 1.0, "format": 0.5}
ALGORITHM = GDPO(advantage=DecoupledRewards(weights=WEIGHTS))


def answered(*answers: dict[str, float], length: int = 1) -> Group:
    rollouts = (
        replace(make_rollout([5], sampled_turn([7] * length)), rewards=rewards, reward=sum(rewards.values()))
        for rewards in answers
    )
    return make_group(*rollouts)


def both(correct: float, form: float) -> dict[str, float]:
    return {"correct": correct, "format": form}


def test_rewards_of_any_size_count_as_they_are_weighed() -> None:
    """Correctness is worth 100 here: added first, it would drown the format."""
    group = answered(both(100.0, 0.0), both(0.0, 0.0), both(100.0, 1.0), both(0.0, 1.0))
    assert ALGORITHM.advantages(group).tolist() == pytest.approx([1 - 0.5, -1 - 0.5, 1 + 0.5, -1 + 0.5], rel=1e-5)


def test_groups_of_equal_sums_still_tell_rollouts_apart() -> None:
    group = answered(both(1.0, 0.0), both(0.0, 1.0))
    assert ALGORITHM.advantages(group).tolist() == pytest.approx([0.5, -0.5], rel=1e-5)
    assert replace(ALGORITHM, drop_constant_groups=True).keep(group)
    assert not replace(ALGORITHM, drop_constant_groups=True).keep(answered(both(1.0, 0.0), both(1.0, 0.0)))


def test_a_reward_that_does_not_vary_adds_exactly_nothing() -> None:
    found = ALGORITHM.advantages(answered(both(0.1 + 0.2, 1.0), both(0.3, 0.0)))
    assert found.tolist() == pytest.approx([0.5, -0.5], rel=1e-5)
    assert torch.equal(ALGORITHM.advantages(answered(both(0.1, 0.0), both(0.1, 0.0))), torch.zeros(2, dtype=torch.float64))


def test_the_sum_is_scaled_by_its_deviation_over_the_batch_s_rollouts() -> None:
    groups = [answered(both(1.0, 1.0), both(0.0, 0.0), length=5), answered(both(0.0, 1.0), both(0.0, 0.0))]
    groups.append(answered(both(1.0, 1.0), both(1.0, 1.0), length=3))
    credit = ALGORITHM.token_credit(pack_for(groups, ALGORITHM)).advantages
    deviation = ((2 * 1.5**2 + 2 * 0.5**2) / 6) ** 0.5
    wanted = [1.5 / deviation] * 5 + [-1.5 / deviation] * 5 + [0.5 / deviation, -0.5 / deviation] + [0.0] * 6
    assert credit.tolist() == pytest.approx(wanted, rel=1e-5)
    assert credit[12:].tolist() == [0.0] * 6, "exactly: the last group has no signal"


def test_an_environment_that_lacks_one_of_the_rewards_is_weighed_by_the_others() -> None:
    found = ALGORITHM.advantages(answered({"format": 1.0}, {"format": 0.0}))
    assert found.tolist() == pytest.approx([0.5, -0.5], rel=1e-5)
    with pytest.raises(ValueError, match="the rewards of this group are"):
        ALGORITHM.advantages(answered({"speed": 1.0}, {"speed": 0.0}))


def test_rewards_must_be_named_and_exist() -> None:
    plan = Plan(group_size=4, environment_rewards=("correct", "format"))
    assert list(ALGORITHM.validate(plan)) == []
    assert any("0 rewards have a weight" in problem for problem in GDPO().validate(plan))
    alone = GDPO(advantage=DecoupledRewards(weights={"correct": 1.0}))
    assert any("choose grpo" in problem for problem in alone.validate(plan))
    wrong = GDPO(advantage=DecoupledRewards(weights={"correct": 1.0, "formatt": 1.0}))
    assert any("formatt" in problem for problem in wrong.validate(plan))
    assert list(wrong.validate(Plan(group_size=4))) == [], "unknown to the plan is not known to be wrong"


def test_a_shaping_that_it_would_not_see_is_refused() -> None:
    problems = list(replace(ALGORITHM, shaping=SoftOverlong()).validate(Plan(group_size=4)))
    assert len(problems) == 1
    assert "SoftOverlong" in problems[0]
