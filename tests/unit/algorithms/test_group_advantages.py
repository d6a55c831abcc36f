"""What advantages are divided by: the deviation of the group, with and without Bessel's correction, or that of the other rewards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strop.algorithms.base import Plan
from strop.algorithms.group_advantages import group_advantages
from strop.algorithms.policy_gradient.advantages.gdpo import GDPO, DecoupledRewards
from strop.types import Group
from support.rollouts import make_group, make_rollout, pack_for, sampled_turn


def credit(*rewards: float, **options: object) -> list[float]:
    found: list[float] = group_advantages(torch.tensor(rewards, dtype=torch.float64), **options).tolist()  # type: ignore[arg-type]
    return found


def test_the_deviation_is_the_population_s_unless_asked_otherwise() -> None:
    assert credit(0.0, 0.0, 1.0, 1.0) == pytest.approx([-1, -1, 1, 1], rel=1e-5)
    assert credit(0.0, 0.0, 1.0, 1.0, deviation="unbiased") == pytest.approx(
        [-(0.75**0.5), -(0.75**0.5), 0.75**0.5, 0.75**0.5], rel=1e-5
    )


def test_with_the_deviation_of_the_others_each_rollout_is_divided_by_its_own() -> None:
    """Of the rewards 0, 1, 1 the deviation is sqrt(1/3), of 0, 0, 1 too, and that of 1, 1, 1 or 0, 0, 0 divides nothing."""
    found = credit(0.0, 0.0, 1.0, 1.0, leave_one_out=True, deviation="others")
    assert found == pytest.approx([-(2 / 3) * 3**0.5, -(2 / 3) * 3**0.5, (2 / 3) * 3**0.5, (2 / 3) * 3**0.5], rel=1e-5)
    single = credit(0.0, 0.0, 0.0, 1.0, leave_one_out=True, deviation="others")
    assert single == pytest.approx([-(1 / 3) * 3**0.5] * 3 + [1.0], rel=1e-5)


@pytest.mark.parametrize("deviation", ["population", "unbiased", "others"])
def test_a_group_without_signal_has_no_credit_whatever_the_deviation(deviation: str) -> None:
    assert credit(0.3, 0.1 + 0.2, 0.3, leave_one_out=True, deviation=deviation) == [0.0, 0.0, 0.0]


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


def test_weights_of_gdpo_without_names_fit_the_rewards_of_the_environment() -> None:
    plan = Plan(group_size=4, environment_rewards=("correct", "format"))
    assert not list(GDPO(advantage=DecoupledRewards(weights=None)).validate(plan))
    assert not list(GDPO(advantage=DecoupledRewards(weights=(1.0, 0.5))).validate(plan))
    (said,) = GDPO(advantage=DecoupledRewards(weights=(1.0, 0.5, 0.2))).validate(plan)
    assert "a reward for each of 3 weights" in said and "correct, format" in said
    (said,) = GDPO(advantage=DecoupledRewards(weights=None)).validate(replace(plan, environment_rewards=("correct",)))
    assert "at least 2 rewards" in said


def test_gdpo_over_the_deviation_of_others_has_mean_zero_and_bessel_s_deviation_one_in_the_batch() -> None:
    advantage = DecoupledRewards(weights=None, leave_one_out=True, deviation="others")
    algorithm = GDPO(advantage=advantage)
    groups = [answered((1.0, 0.0), (0.0, 0.0), (0.0, 1.0), (0.0, 1.0)), answered((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (1.0, 0.0))]
    found = algorithm.token_credit(pack_for(groups, algorithm)).advantages.double()
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-6) and float(found.std(correction=1)) == pytest.approx(1.0, rel=1e-5)
