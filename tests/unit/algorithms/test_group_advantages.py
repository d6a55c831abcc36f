"""What advantages are divided by: the deviation of the group, with and without Bessel's correction, or that of the other rewards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strop.algorithms.group_advantages import group_advantages
from strop.algorithms.policy_gradient.advantages.gdpo import GDPO, DecoupledRewards
from strop.types import Group
from support.rollouts import make_group, make_rollout, sampled_turn


def credit(*rewards: float, **options: object) -> list[float]:
    found: list[float] = group_advantages(torch.tensor(rewards, dtype=torch.float64), **options).tolist()  # type: ignore[arg-type]
    return found


def test_two_rollouts_have_no_deviation_of_others_to_divide_by() -> None:
    assert credit(0.0, 1.0, leave_one_out=True, deviation="others") == [-1.0, 1.0]
    assert credit(0.0, 1.0, deviation="unbiased") == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)


def test_rewards_of_others_that_differ_by_rounding_divide_nothing() -> None:
    """A float32 sum would make 1e-8 of them, and credit of millions."""
    assert credit(0.1 + 0.2, 0.3, 0.3, 1.0, leave_one_out=True, deviation="others")[3] == pytest.approx(0.7)


def answered(*answers: tuple[float, float]) -> Group:
    rollouts = (
        replace(make_rollout([5], sampled_turn([7])), rewards={"correct": correct, "format": form}, reward=correct + form)
        for correct, form in answers
    )
    return make_group(*rollouts)


def test_gdpo_takes_its_weights_in_the_order_of_the_names_or_one_for_each() -> None:
    group = answered((1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (0.0, 1.0))
    named = GDPO(advantage=DecoupledRewards(weights={"correct": 1.0, "format": 0.5})).advantages(group)
    listed = GDPO(advantage=DecoupledRewards(weights=(1.0, 0.5))).advantages(group)
    assert torch.equal(named, listed)
    both = GDPO(advantage=DecoupledRewards(weights={"correct": 1.0, "format": 1.0})).advantages(group)
    assert torch.equal(GDPO(advantage=DecoupledRewards(weights=None)).advantages(group), both)
    with pytest.raises(ValueError, match="3 weights"):
        GDPO(advantage=DecoupledRewards(weights=(1.0, 0.5, 0.1))).advantages(group)
