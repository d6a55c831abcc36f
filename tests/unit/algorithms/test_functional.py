"""Advantages and losses against the definitions written as slow loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithms.functional import aggregate, clipped_surrogate, sequence_mean, varies
from strop.algorithms.group_advantages import group_advantages
from strop.algorithms.kl import kl_estimate
from support.rollouts import pack_grpo, simple_groups

_rewards = st.lists(st.floats(-10, 10, allow_nan=False).map(lambda value: round(value, 3)), min_size=2, max_size=16)


def rewards_of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(values=_rewards)
def test_by_default_an_advantage_is_reward_minus_mean_over_population_deviation(values: list[float]) -> None:
    found = group_advantages(rewards_of(*values)).tolist()
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    if max(values) - min(values) <= 1e-6 * max(abs(value) for value in values):
        assert found == [0.0] * len(values)
    else:
        assert found == pytest.approx([(value - mean) / (deviation + 1e-6) for value in values], rel=1e-9, abs=1e-9)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(values=_rewards, leave_one_out=st.booleans(), normalize=st.booleans())
def test_the_options_of_an_advantage_follow_their_definitions(values: list[float], leave_one_out: bool, normalize: bool) -> None:
    rewards = rewards_of(*values)
    found = group_advantages(rewards, leave_one_out=leave_one_out, normalize=normalize).tolist()
    if not varies(rewards):
        assert found == [0.0] * len(values)
        return
    count, mean = len(values), sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / count)
    for place, value in enumerate(values):
        others = [other for index, other in enumerate(values) if index != place]
        baseline = sum(others) / (count - 1) if leave_one_out else mean
        wanted = (value - baseline) / (deviation + 1e-6 if normalize else 1.0)
        assert found[place] == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 0.1, 1e-8, 1e8])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_a_group_that_does_not_vary_has_advantages_of_exactly_zero(value: float, leave_one_out: bool) -> None:
    for normalize in (True, False):
        found = group_advantages(rewards_of(*[value] * 7), leave_one_out=leave_one_out, normalize=normalize)
        assert torch.equal(found, torch.zeros(7, dtype=torch.float64))


def test_float32_residue_is_not_signal() -> None:
    """Sums of the same rewards in another order differ in the last bit; NeMo-RL#4158 blew that up 4,000 times."""
    left = float(torch.tensor(0.6))
    right = float(torch.nextafter(torch.tensor(0.6), torch.tensor(1.0)))
    assert left != right
    assert torch.equal(group_advantages(rewards_of(left, right, left, left)), torch.zeros(4, dtype=torch.float64))


def test_small_but_real_differences_are_signal() -> None:
    assert group_advantages(rewards_of(0.0, 1e-3)).tolist() == pytest.approx([-1.0, 1.0], rel=1e-2)
    assert group_advantages(rewards_of(1.0, 1.0001)).tolist() == pytest.approx([-1.0, 1.0], rel=0.05)


def test_a_lone_success_among_sixteen_gets_its_due() -> None:
    """(1 - 1/16) / sqrt(1/16 x 15/16) = 3.873; a leave-one-out deviation would give +1.00 and a net-negative group."""
    rewards = rewards_of(1.0, *[0.0] * 15)
    found = group_advantages(rewards)
    assert float(found[0]) == pytest.approx(3.873, abs=1e-3)
    assert float(found.sum()) == pytest.approx(0.0, abs=1e-9)
    alone = group_advantages(rewards, leave_one_out=True)
    assert float(alone[0]) == pytest.approx(4.131, abs=1e-3)
    assert float(alone.sum()) == pytest.approx(0.0, abs=1e-9)


def test_without_a_baseline_rewards_are_only_scaled() -> None:
    rewards = rewards_of(1.0, 3.0)
    assert torch.equal(group_advantages(rewards, baseline=False, normalize=False), rewards)
    assert group_advantages(rewards, baseline=False).tolist() == pytest.approx([1.0, 3.0], rel=1e-5)


def test_a_leave_one_out_baseline_of_one_rollout_is_refused_or_zero() -> None:
    assert group_advantages(rewards_of(2.0), leave_one_out=True).tolist() == [0.0], "a group of one does not vary"


def numbers(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.3, 2.0)])
def test_the_clipped_surrogate_is_that_of_a_slow_loop(low: float, high: float, dual: float | None) -> None:
    ratios, advantages = numbers(200, 0).exp(), numbers(200, 1)
    found = clipped_surrogate(ratios, advantages, low=low, high=high, dual=dual)
    outside = 0
    for ratio, advantage, own in zip(ratios.tolist(), advantages.tolist(), found.tolist(), strict=True):
        bounded = min(max(ratio, 1 - low), 1 + high)
        wanted = min(ratio * advantage, bounded * advantage)
        if dual is not None and advantage < 0:
            wanted = max(wanted, dual * advantage)
        outside += bounded != ratio
        assert own == pytest.approx(wanted, rel=1e-12)
    assert outside > 50, "the clip was exercised"


def test_the_surrogate_has_no_slope_where_it_is_clipped() -> None:
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 9.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0])
    clipped_surrogate(ratio, advantages, low=0.2, high=0.2, dual=3.0).sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [0.0, 0.0, -1.0, 1.0, 0.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize(("input_clamp", "output_clamp"), [(None, None), (0.5, None), (None, 0.4), (1.0, 0.3)])
def test_kl_estimates_are_those_of_a_slow_loop(estimator: Any, input_clamp: float | None, output_clamp: float | None) -> None:
    policy, reference = numbers(200, 2), numbers(200, 3)
    found = kl_estimate(policy, reference, estimator, input_clamp=input_clamp, output_clamp=output_clamp)
    for own, ours, theirs in zip(found.tolist(), policy.tolist(), reference.tolist(), strict=True):
        difference = theirs - ours
        if input_clamp is not None:
            difference = min(max(difference, -input_clamp), input_clamp)
        wanted = {"k1": -difference, "k2": difference**2 / 2, "k3": math.exp(difference) - 1 - difference}[estimator]
        if output_clamp is not None:
            wanted = min(max(wanted, -output_clamp), output_clamp)
        assert own == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative() -> None:
    policy, reference = numbers(50, 4).log_softmax(0), numbers(50, 5).log_softmax(0)
    exact = float((policy.exp() * (policy - reference)).sum())
    for estimator in ("k1", "k3"):
        assert float((policy.exp() * kl_estimate(policy, reference, estimator)).sum()) == pytest.approx(exact, rel=1e-9)
    assert bool((kl_estimate(policy, reference, "k3") >= 0).all())
    assert kl_estimate(policy, policy, "k3").abs().max() == 0


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean", "sequence_sum", "constant_length"])
def test_aggregations_are_those_of_a_slow_loop(how: Any) -> None:
    batch = pack_grpo(simple_groups((3, (2, 5)), (4, (1, 7, 3))))
    values = numbers(len(batch.target), 6)
    lengths = batch.sequence_lengths.tolist()
    sums = [0.0] * batch.num_sequences
    for value, sequence in zip(values.tolist(), batch.sequence.tolist(), strict=True):
        sums[sequence] += value
    wanted = {
        "token_mean": sum(sums) / sum(lengths),
        "sequence_mean": sum(total / length for total, length in zip(sums, lengths, strict=True)) / 5,
        "sequence_sum": sum(sums) / 5,
        "constant_length": sum(sums) / 5 / 11,
    }[how]
    assert float(aggregate(values, batch, how, 11)) == pytest.approx(wanted, rel=1e-12)
    means = [total / length for total, length in zip(sums, lengths, strict=True)]
    assert sequence_mean(values, batch).tolist() == pytest.approx(means, rel=1e-12)


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
