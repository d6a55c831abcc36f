"""Rewards -> credit against the papers' formulas in plain loops, on every group of ``cases.REWARDS``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from conformance import formulas_advantages as formulas
from conformance import formulas_kl
from conformance.advantages import GROUP_ADVANTAGES, GroupCase
from conformance.cases import REWARDS, STEPS, Step
from conformance.compose import part, policy_gradient
from conformance.harness import SINGLE, Leaves, packed
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.parts import GroupRewards
from support.each import each

GROUP = each("rewards", REWARDS.values(), ids=REWARDS)
CASE = pytest.mark.parametrize("case", GROUP_ADVANTAGES, ids=str)


def lengths_of(rewards: Sequence[float], seed: int = 0) -> list[float]:
    draw = random.Random(f"{len(rewards)} {seed}")
    return [float(draw.choice([0, 1, 2, 9, 40])) for _ in rewards]


def credit(case: GroupCase, rewards: Sequence[float], lengths: Sequence[float], greedy: float = 0.5) -> list[float]:
    rewards = taken(case, rewards)
    group = GroupRewards(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        lengths=torch.tensor(lengths, dtype=torch.float64),
        greedy_reward=greedy,
    )
    found: list[float] = part(case.part, **case.options).rollout_advantages(group).tolist()
    return found


def taken(case: GroupCase, rewards: Sequence[float]) -> list[float]:
    """The rewards, without their sign where the advantage wants a success rate."""
    return [abs(reward) for reward in rewards] if case.success else list(rewards)


@CASE
@GROUP
def test_credit_is_its_papers_formula(case: GroupCase, rewards: list[float]) -> None:
    lengths = lengths_of(rewards)
    wanted = case.formula(taken(case, rewards), lengths, 0.5)
    assert credit(case, rewards, lengths) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@CASE
def test_credit_without_any_token_is_finite(case: GroupCase) -> None:
    assert all(map(_finite, credit(case, [1.0, 0.0, 0.5], [0.0, 0.0, 0.0])))


def _finite(number: float) -> bool:
    return number - number == 0


@pytest.mark.parametrize("case", [case for case in GROUP_ADVANTAGES if case.relative], ids=str)
@pytest.mark.parametrize(
    "name", ["all right", "all wrong", "all the same, not representable", "float residue", "float32 residue"]
)
def test_a_group_that_does_not_vary_has_no_credit_at_all(case: GroupCase, name: str) -> None:
    rewards = REWARDS[name]
    assert credit(case, rewards, lengths_of(rewards)) == [0.0] * len(rewards)


rewards_of_groups = st.lists(st.integers(-8, 8).map(lambda eighths: eighths / 8), min_size=2, max_size=9)


@pytest.mark.parametrize("case", [case for case in GROUP_ADVANTAGES if case.shift], ids=str)
@settings(derandomize=True, deadline=None, max_examples=40)
@given(rewards=rewards_of_groups, shift=st.integers(-16, 16))
def test_a_constant_added_to_all_rewards_changes_nothing(case: GroupCase, rewards: list[float], shift: int) -> None:
    lengths = lengths_of(rewards)
    moved = credit(case, [reward + shift for reward in rewards], lengths)
    assert moved == pytest.approx(credit(case, rewards, lengths), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("case", [case for case in GROUP_ADVANTAGES if case.scale is not None], ids=str)
@settings(derandomize=True, deadline=None, max_examples=40)
@given(rewards=rewards_of_groups, scale=st.sampled_from([0.25, 3.0, 1000.0]))
def test_a_factor_on_all_rewards_goes_where_it_should(case: GroupCase, rewards: list[float], scale: float) -> None:
    lengths = lengths_of(rewards)
    scaled = credit(case, [scale * reward for reward in rewards], lengths)
    plain = credit(case, rewards, lengths)
    factor = scale if case.scale == "follows" else 1.0
    assert scaled == pytest.approx([factor * advantage for advantage in plain], rel=1e-3, abs=1e-6)  # eps beside the deviation


@pytest.mark.parametrize("case", [case for case in GROUP_ADVANTAGES if case.zero_sum], ids=str)
@settings(derandomize=True, deadline=None, max_examples=40)
@given(rewards=rewards_of_groups)
def test_the_credit_of_a_group_sums_to_zero(case: GroupCase, rewards: list[float]) -> None:
    assert sum(credit(case, rewards, lengths_of(rewards))) == pytest.approx(0.0, abs=1e-6)


@CASE
@settings(derandomize=True, deadline=None, max_examples=40)
@given(rewards=rewards_of_groups, seed=st.integers(0, 100))
def test_rollouts_can_come_in_any_order(case: GroupCase, rewards: list[float], seed: int) -> None:
    lengths = lengths_of(rewards)
    order = list(range(len(rewards)))
    random.Random(seed).shuffle(order)
    moved = credit(case, [rewards[i] for i in order], [lengths[i] for i in order])
    plain = credit(case, rewards, lengths)
    assert moved == pytest.approx([plain[i] for i in order], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("case", [case for case in GROUP_ADVANTAGES if case.monotone], ids=str)
@settings(derandomize=True, deadline=None, max_examples=40)
@given(rewards=rewards_of_groups)
def test_a_better_rollout_never_has_less_credit(case: GroupCase, rewards: list[float]) -> None:
    assume(len(set(rewards)) > 1)
    ranked = sorted(zip(taken(case, rewards), credit(case, rewards, lengths_of(rewards)), strict=True))
    assert all(later[1] >= earlier[1] - 1e-12 for earlier, later in itertools.pairwise(ranked))


def test_a_lone_success_in_16_has_its_due() -> None:
    """(1 - 1/16) / std = sqrt(15): dividing by a leave-one-out deviation would give it 1."""
    alone = credit(GroupCase("group_relative", lambda *_: []), REWARDS["a lone success in 16"], [1.0] * 16)
    assert alone[0] == pytest.approx(15**0.5, rel=1e-5)
    assert alone[1:] == pytest.approx([-(15**-0.5)] * 15, rel=1e-5)


def test_a_success_rate_is_never_negative() -> None:
    with pytest.raises(ValueError, match="success rate"):
        part("success_rate").rollout_advantages(GroupRewards(rewards=torch.tensor([1.0, -1.0]), lengths=torch.ones(2)))


# Credit that looks at the whole batch, through ``pack`` and ``credit``

STEP = each("step", STEPS.values(), ids=STEPS)


def credited(step: Step, advantage: str, options: dict[str, Any], *, kl: Kl | None = None) -> list[list[float]]:
    """What each token of each rollout has. Truncated rollouts do not count."""
    subject = policy_gradient(advantage=part(advantage, **options), kl=kl)
    batch = subject.token_credit(packed(step, subject))
    flat = iter(batch.advantages.tolist())
    return [[next(flat) for _ in sample.now] for sample in step.samples]


def rewards_of(step: Step) -> list[list[float]]:
    return [[sample.reward for sample in group] for group in step.groups]


def per_rollout(step: Step, credit: Sequence[Sequence[float]]) -> list[list[float]]:
    flat = [advantage for group in credit for advantage in group]
    return [[advantage] * sample.length for advantage, sample in zip(flat, step.samples, strict=True)]


def assert_credit(found: list[list[float]], wanted: list[list[float]], step: Step) -> None:
    """Of the rollouts that count; seven digits, as the column is float32."""
    for sample, here, there in zip(step.samples, found, wanted, strict=True):
        if not sample.truncated:
            assert here == pytest.approx(there, rel=SINGLE, abs=SINGLE)


@STEP
def test_lite_ppo_scales_by_the_deviation_of_the_batch(step: Step) -> None:
    wanted = per_rollout(step, formulas.lite_ppo(rewards_of(step)))
    assert_credit(credited(step, "batch_scaled", {}), wanted, step)


@STEP
def test_reinforce_minus_the_mean_of_the_batch(step: Step) -> None:
    rewards = [sample.reward for sample in step.samples]
    wanted = [[sample.reward - sum(rewards) / len(rewards)] * sample.length for sample in step.samples]
    assert_credit(credited(step, "plain_reward", {"batch_mean": True}), wanted, step)


@STEP
@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_pp_whitens_over_the_tokens_of_the_batch(step: Step, baseline: bool) -> None:
    lengths = [[0 if sample.truncated else sample.length for sample in group] for group in step.groups]
    wanted = [tokens for group in formulas.reinforce_pp(rewards_of(step), lengths, baseline=baseline) for tokens in group]
    assert_credit(credited(step, "batch_whitened", {"group_mean": baseline}), wanted, step)


@STEP
def test_reinforce_pp_whitens_after_the_kl_penalty(step: Step) -> None:
    if step.name in ("log ratios of 50", "huge rewards"):
        pytest.skip("the penalties cancel to seven digits")
    kl = Kl(weight=0.05, estimator="k1", place="token_reward", input_clamp=None, output_clamp=None)
    rows = Leaves(step).rows()
    plain = [[row.reward - 0.05 * float(penalty) for penalty in formulas_kl.to_come(row, "k1")] for row in rows]
    white = iter(formulas.whiten([number for row, numbers in zip(rows, plain, strict=True) if row.counts for number in numbers]))
    wanted = [[next(white) if row.counts else 0.0 for _ in row.tokens] for row in rows]
    found = credited(step, "batch_whitened", {}, kl=kl)
    for row, here, there in zip(rows, found, wanted, strict=True):
        if row.counts:
            assert here == pytest.approx(there, rel=1e-5, abs=1e-5)


@STEP
@pytest.mark.parametrize("gamma", [0.9, 0.3])
def test_reinforce_pp_discounts_the_reward_at_the_last_token_and_later_kl_terms(gamma: float, step: Step) -> None:
    """G_t = r_t + gamma G_{t+1}, r_t = -beta k1_t, and the reward too at the last token; then whitened."""
    if step.name in ("log ratios of 50", "huge rewards"):
        pytest.skip("the penalties cancel to seven digits")
    kl = Kl(weight=0.05, estimator="k1", place="token_reward", input_clamp=None, output_clamp=None)
    rows = Leaves(step).rows()
    plain: list[list[float]] = []
    for row in rows:
        credit = [0.0] * row.length
        for t in reversed(row.tokens):
            own = -0.05 * float(formulas_kl.k1(row.before[t], row.reference[t])) + (row.reward if t == row.length - 1 else 0.0)
            credit[t] = own + (gamma * credit[t + 1] if t + 1 < row.length else 0.0)
        plain.append(credit)
    white = iter(formulas.whiten([number for row, numbers in zip(rows, plain, strict=True) if row.counts for number in numbers]))
    wanted = [[next(white) if row.counts else 0.0 for _ in row.tokens] for row in rows]
    found = credited(step, "batch_whitened", {"gamma": gamma}, kl=kl)
    for row, here, there in zip(rows, found, wanted, strict=True):
        if row.counts:
            assert here == pytest.approx(there, rel=1e-4, abs=1e-4), "the undiscounted credit is rounded to float32"


@STEP
def test_gdpo_normalises_each_reward_by_itself(step: Step) -> None:
    if any(not sample.length for sample in step.samples):
        pytest.skip("the batch's deviation is over rollouts with tokens: no column holds the credit of an empty one")
    weights = {"correct": 1.0, "format": 0.3}
    parts = [[dict(sample.parts) for sample in group] for group in step.groups]
    wanted = per_rollout(step, formulas.gdpo(parts, weights))
    assert_credit(credited(step, "decoupled_rewards", {"weights": weights}), wanted, step)
    unbiased = per_rollout(step, formulas.gdpo(parts, weights, bessel=True))
    assert_credit(credited(step, "decoupled_rewards", {"weights": weights, "deviation": "unbiased"}), unbiased, step)


@STEP
@pytest.mark.parametrize(
    "advantage, options",
    [("group_relative", {}), ("leave_one_out", {}), ("length_weighted", {}), ("best_of_k", {}), ("greedy_baseline", {})],
    ids=lambda value: str(value),
)
def test_credit_of_a_group_reaches_each_of_its_tokens(step: Step, advantage: str, options: dict[str, Any]) -> None:
    """Empty and filtered rollouts count in the baseline."""
    case = next(case for case in GROUP_ADVANTAGES if case.part == advantage and case.options == options)
    credit = [
        case.formula([sample.reward for sample in group], [float(sample.length) for sample in group], greedy)
        for group, greedy in zip(step.groups, step.greedy, strict=True)
    ]
    assert_credit(credited(step, advantage, options), per_rollout(step, credit), step)


@pytest.mark.parametrize("advantage", ["group_relative", "leave_one_out", "batch_scaled", "batch_whitened", "best_of_k"])
def test_groups_can_come_in_any_order(advantage: str) -> None:
    step = STEPS["random"]
    turned = replace(step, groups=tuple(reversed(step.groups)), greedy=tuple(reversed(step.greedy)))
    plain, moved = credited(step, advantage, {}), credited(turned, advantage, {})
    first = len(step.groups[0])
    for here, there in zip([*plain[first:], *plain[:first]], moved, strict=True):
        assert here == pytest.approx(there, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("advantage", ["group_relative", "leave_one_out", "length_weighted", "best_of_k"])
def test_dropping_a_group_that_does_not_vary_changes_no_other_credit(advantage: str) -> None:
    step = STEPS["one-sided groups"]
    alone = replace(step, groups=step.groups[2:], greedy=step.greedy[2:])
    assert credited(step, advantage, {})[5:] == credited(alone, advantage, {})


@pytest.mark.parametrize("length", [0, 5, 6, 8, 9, 10, 11, 400])
def test_soft_overlong_punishment_is_a_line_down_to_the_limit(length: int) -> None:
    shaped = part("soft_overlong", max_length=10, buffer=4, penalty=0.7).shape(
        torch.tensor([1.0, 0.0]), torch.tensor([float(length), 1.0]), torch.tensor([length > 10, False])
    )
    expected = formulas.soft_overlong(length, max_length=10, buffer=4, penalty=0.7)
    assert shaped.tolist() == pytest.approx([1.0 + expected, 0.0], rel=1e-12)


def test_advantages_are_clipped_last() -> None:
    step = STEPS["a lone success in 16"]
    subject = policy_gradient(advantage=part("group_relative"), advantage_low=-0.1, advantage_high=2.0)
    found = subject.token_credit(packed(step, subject)).advantages.tolist()
    wanted = [min(max(value, -0.1), 2.0) for value in formulas.grpo(rewards_of(step)[0]) for _ in range(2)]
    assert found == pytest.approx(wanted, rel=1e-9)


def test_a_shaped_reward_is_what_the_baseline_sees() -> None:
    """DAPO's soft punishment before its group's mean and deviation."""
    step = STEPS["random"]
    shaping = part("soft_overlong", max_length=5, buffer=3, penalty=0.7)
    subject = policy_gradient(advantage=part("group_relative"), shaping=shaping)
    batch = subject.token_credit(packed(step, subject))
    shaped = [
        [sample.reward + formulas.soft_overlong(sample.length, max_length=5, buffer=3, penalty=0.7) for sample in group]
        for group in step.groups
    ]
    assert batch.rewards.tolist() == pytest.approx([reward for group in shaped for reward in group], rel=1e-12)
    flat = iter(batch.advantages.tolist())
    wanted = per_rollout(step, [formulas.grpo(group) for group in shaped])
    assert_credit([[next(flat) for _ in sample.now] for sample in step.samples], wanted, step)
