"""Credit of groups: what the formulas of tests/conformance leave open."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from strop.algorithms.functional import aggregate, group_advantages, varies, whiten
from strop.algorithms.policy_gradient.grpo_variants import DAPO, SoftOverlong
from strop.extensions.policy_gradients.baselines import ReinforcePP, ReinforcePPBaseline
from strop.extensions.policy_gradients.group_credit import GDPO, BestOfK, DecoupledRewards, SuccessRate
from strop.types import Group
from support.rollouts import make_group, make_rollout, pack_for, pack_grpo, sampled_turn, simple_groups
from support.tokens import loss_gradients, make_group_rewards, make_step


def credit(*rewards: float, **options: object) -> list[float]:
    found: list[float] = group_advantages(torch.tensor(rewards, dtype=torch.float64), **options).tolist()  # type: ignore[arg-type]
    return found


def answered(*answers: tuple[float, int]) -> Group:
    """The reward and length of each rollout."""
    return make_group(*(make_rollout([5], sampled_turn([7] * length), reward=reward) for reward, length in answers))


def rewarded(*rewards: dict[str, float]) -> Group:
    """The rewards of each rollout by name."""
    rollouts = (make_rollout([5], sampled_turn([7]), reward=sum(each.values())) for each in rewards)
    return make_group(*(replace(rollout, rewards=each) for rollout, each in zip(rollouts, rewards, strict=True)))


def both(correct: float, form: float) -> dict[str, float]:
    return {"correct": correct, "format": form}


def test_float32_residue_is_not_signal() -> None:
    """Sums of the same rewards in another order differ in the last bit; NeMo-RL#4158 blew that up 4,000 times."""
    left = float(torch.tensor(0.6))
    right = float(torch.nextafter(torch.tensor(0.6), torch.tensor(1.0)))
    assert left != right
    assert credit(left, right, left, left) == [0.0] * 4


def test_small_but_real_differences_are_signal() -> None:
    assert credit(0.0, 1e-3) == pytest.approx([-1.0, 1.0], rel=1e-2)
    assert credit(1.0, 1.0001) == pytest.approx([-1.0, 1.0], rel=0.05)


def test_a_leave_one_out_baseline_of_one_rollout_is_refused_or_zero() -> None:
    assert credit(2.0, leave_one_out=True) == [0.0], "a group of one does not vary"


def test_a_constant_length_must_be_given() -> None:
    batch = pack_grpo(simple_groups((3, (2,))))
    with pytest.raises(ValueError, match="positive constant_length"):
        aggregate(torch.ones(2), batch, "constant_length")


@pytest.mark.parametrize(
    ("rewards", "dtype", "vary"),
    [
        ([1e8, 1e8 + 1, 1e8 + 2, 1e8 + 3], torch.float64, True),
        ([1000.0, 1000.0001, 1000.0002], torch.float64, True),
        ([1e-9, 2e-9], torch.float64, True),
        ([0.1 + 0.2, 0.3], torch.float64, False),
        ([1e7, 1e7 + 1], torch.float64, True),
        ([0.1 * 3, 0.3, 0.1 + 0.1 + 0.1], torch.float64, False),
        ([1000.0, 1000.0001], torch.float32, False),
    ],
)
def test_rewards_that_differ_little_vary_as_far_as_their_data_type_tells(
    rewards: list[float], dtype: torch.dtype, vary: bool
) -> None:
    assert varies(torch.tensor(rewards, dtype=dtype)) is vary


def test_two_rollouts_have_no_deviation_of_others_to_divide_by() -> None:
    assert credit(0.0, 1.0, leave_one_out=True, deviation="others") == [-1.0, 1.0]
    assert credit(0.0, 1.0, deviation="unbiased") == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)


def test_rewards_of_others_that_differ_by_rounding_divide_nothing() -> None:
    """A float32 sum would make 1e-8 of them, and credit of millions."""
    assert credit(0.1 + 0.2, 0.3, 0.3, 1.0, leave_one_out=True, deviation="others")[3] == pytest.approx(0.7)


def test_gdpo_takes_its_weights_in_the_order_of_the_names_or_one_for_each() -> None:
    group = rewarded(both(1.0, 0.0), both(0.0, 0.0), both(1.0, 1.0), both(0.0, 1.0))
    named = GDPO(advantage=DecoupledRewards(weights={"correct": 1.0, "format": 0.5})).advantages(group)
    listed = GDPO(advantage=DecoupledRewards(weights=(1.0, 0.5))).advantages(group)
    assert torch.equal(named, listed)
    equal = GDPO(advantage=DecoupledRewards(weights={"correct": 1.0, "format": 1.0})).advantages(group)
    assert torch.equal(GDPO(advantage=DecoupledRewards(weights=None)).advantages(group), equal)
    with pytest.raises(ValueError, match="3 weights"):
        GDPO(advantage=DecoupledRewards(weights=(1.0, 0.5, 0.1))).advantages(group)


ALGORITHM = GDPO(advantage=DecoupledRewards(weights={"correct": 1.0, "format": 0.5}))


def test_groups_of_equal_sums_still_tell_rollouts_apart() -> None:
    group = rewarded(both(1.0, 0.0), both(0.0, 1.0))
    assert ALGORITHM.advantages(group).tolist() == pytest.approx([0.5, -0.5], rel=1e-5)
    assert replace(ALGORITHM, drop_constant_groups=True).keep(group)
    assert not replace(ALGORITHM, drop_constant_groups=True).keep(rewarded(both(1.0, 0.0), both(1.0, 0.0)))


def test_an_environment_that_lacks_one_of_the_rewards_is_weighed_by_the_others() -> None:
    found = ALGORITHM.advantages(rewarded({"format": 1.0}, {"format": 0.0}))
    assert found.tolist() == pytest.approx([0.5, -0.5], rel=1e-5)
    with pytest.raises(ValueError, match="the rewards of this group are"):
        ALGORITHM.advantages(rewarded({"speed": 1.0}, {"speed": 0.0}))


def test_a_group_of_nothing_but_successes_is_replaced_however_long_they_are() -> None:
    """The paper filters by accuracy; the punishment does not make a solved task worth keeping."""
    algorithm = DAPO(shaping=SoftOverlong(buffer=4, max_length=8))
    assert not algorithm.keep(answered((1.0, 2), (1.0, 6)))
    assert algorithm.keep(answered((1.0, 2), (0.0, 2)))


def test_the_upper_clip_is_higher_than_the_lower() -> None:
    before, now = [[-1.0, -1.0], [-1.0, -1.0]], [[-1.0 + 0.24, -1.0 + 0.25], [-1.0 - 0.22, -1.0 - 0.23]]
    _, slope, logged = loss_gradients(DAPO(), make_step(now, [1.0, -1.0], old=before))
    assert [value != 0 for value in slope] == [True, False, True, False]
    assert logged["ratio_clipped"] == pytest.approx(0.5)


def test_negative_rewards_are_refused_where_they_come_from() -> None:
    with pytest.raises(ValueError, match="reward_scaling"):
        SuccessRate().rollout_advantages(make_group_rewards(1.0, -1.0))


def test_a_group_without_a_greedy_rollout_is_an_error() -> None:
    GreedyBaseline = pytest.importorskip("strop.extensions.policy_gradients.baselines").GreedyBaseline
    with pytest.raises(ValueError, match="this group has none"):
        GreedyBaseline().rollout_advantages(make_group_rewards(1.0))


def test_the_greedy_response_is_shaped_like_the_others() -> None:
    ReMax = pytest.importorskip("strop.extensions.policy_gradients.baselines").ReMax
    algorithm = ReMax(shaping=SoftOverlong(buffer=2, max_length=4))
    greedy = make_rollout([5], sampled_turn([7] * 3), reward=1.0)
    assert algorithm.advantages(replace(answered((1.0, 1)), baseline=greedy)).tolist() == [0.5]


def test_a_truncated_rollout_can_lose_a_share_of_its_reward_too() -> None:
    part = SoftOverlong(buffer=40, max_length=100, truncated_factor=0.5)
    shaped = part.shape(torch.ones(2), torch.tensor([80.0, 80.0]), torch.tensor([True, False]))
    assert shaped.tolist() == [0.5 - 0.5, 1.0 - 0.5]


@pytest.mark.parametrize("algorithm", [ReinforcePP(kl=None), ReinforcePPBaseline(kl=None)])
def test_a_batch_that_does_not_vary_earns_exactly_nothing(algorithm: ReinforcePP) -> None:
    batch = algorithm.token_credit(pack_for([answered((0.1, 3), (0.1, 1)), answered((0.1, 2), (0.1, 2))], algorithm))
    assert torch.equal(batch.advantages, torch.zeros(8))


def test_whitening_nothing_is_harmless() -> None:
    BatchWhitened = pytest.importorskip("strop.extensions.policy_gradients.baselines").BatchWhitened
    assert whiten(torch.ones(3), torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    assert len(whiten(torch.zeros(0), torch.zeros(0))) == 0
    assert BatchWhitened().min_group_size == 2


@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_analytic_form_of_pass_at_k_compares_the_sets_with_a_rollout_to_all_sets(k: int) -> None:
    rewards = [0.0, 3.0, 1.0, 1.0, 4.0, 2.0]
    found = BestOfK(k=k, analytic=True).rollout_advantages(make_group_rewards(*rewards)).tolist()
    best = {chosen: max(rewards[place] for place in chosen) for chosen in combinations(range(len(rewards)), k)}
    mean = sum(best.values()) / len(best)
    deviation = (sum((value - mean) ** 2 for value in best.values()) / len(best)) ** 0.5
    for place, credited in enumerate(found):
        own = [value for chosen, value in best.items() if place in chosen]
        assert credited == pytest.approx((sum(own) / len(own) - mean) / (deviation + 1e-6), abs=1e-9)
