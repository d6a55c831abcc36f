"""GDPO: each reward is normalised by itself before they are added."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strop.algorithms.policy_gradient.advantages.gdpo import GDPO, DecoupledRewards
from strop.types import Group
from support.rollouts import make_group, make_rollout, sampled_turn

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


def test_groups_of_equal_sums_still_tell_rollouts_apart() -> None:
    group = answered(both(1.0, 0.0), both(0.0, 1.0))
    assert ALGORITHM.advantages(group).tolist() == pytest.approx([0.5, -0.5], rel=1e-5)
    assert replace(ALGORITHM, drop_constant_groups=True).keep(group)
    assert not replace(ALGORITHM, drop_constant_groups=True).keep(answered(both(1.0, 0.0), both(1.0, 0.0)))


def test_an_environment_that_lacks_one_of_the_rewards_is_weighed_by_the_others() -> None:
    found = ALGORITHM.advantages(answered({"format": 1.0}, {"format": 0.0}))
    assert found.tolist() == pytest.approx([0.5, -0.5], rel=1e-5)
    with pytest.raises(ValueError, match="the rewards of this group are"):
        ALGORITHM.advantages(answered({"speed": 1.0}, {"speed": 0.0}))
