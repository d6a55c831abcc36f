"""Pass@k training: credit for what the best of k would lose."""

from __future__ import annotations

from itertools import combinations
from math import comb

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.advantages.pass_at_k import BestOfK, PassAtK
from support.tokens import make_group_rewards

_rewards = st.lists(st.integers(0, 4).map(float), min_size=2, max_size=7)


def test_only_the_best_has_credit_and_it_is_the_distance_to_the_second() -> None:
    assert BestOfK().rollout_advantages(make_group_rewards(0.2, 0.9, 0.5)).tolist() == pytest.approx([0.0, 0.4, 0.0])
    assert BestOfK().rollout_advantages(make_group_rewards(1.0, 0.0, 1.0)).tolist() == [0.0, 0.0, 0.0], "either could be missed"
    assert BestOfK().rollout_advantages(make_group_rewards(0.3, 0.1 + 0.2)).tolist() == [0.0, 0.0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rewards=_rewards, data=st.data())
def test_it_is_a_mean_over_all_sets_of_k(rewards: list[float], data: st.DataObject) -> None:
    size = len(rewards)
    k = data.draw(st.integers(2, size))
    found = BestOfK(k=k).rollout_advantages(make_group_rewards(*rewards)).tolist()
    for place in range(size):
        others = [rewards[other] for other in range(size) if other != place]
        losses = [max(max(chosen), rewards[place]) - max(chosen) for chosen in combinations(others, k - 1)]
        assert found[place] == pytest.approx(sum(losses) / len(losses), abs=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rewards=_rewards, data=st.data())
def test_the_analytic_form_compares_sets_with_a_rollout_to_all_sets(rewards: list[float], data: st.DataObject) -> None:
    size = len(rewards)
    if size < 3 or len(set(rewards)) == 1:
        return
    k = data.draw(st.integers(2, size - 1))
    found = BestOfK(k=k, analytic=True).rollout_advantages(make_group_rewards(*rewards)).tolist()
    best = {chosen: max(rewards[place] for place in chosen) for chosen in combinations(range(size), k)}
    mean = sum(best.values()) / len(best)
    deviation = (sum((value - mean) ** 2 for value in best.values()) / len(best)) ** 0.5
    for place in range(size):
        own = [value for chosen, value in best.items() if place in chosen]
        assert found[place] == pytest.approx((sum(own) / len(own) - mean) / (deviation + 1e-6), abs=1e-9)


@pytest.mark.parametrize(("size", "right", "k"), [(8, 2, 4), (8, 1, 2), (6, 5, 3)])
def test_for_successes_and_failures_the_analytic_form_is_the_paper_s(size: int, right: int, k: int) -> None:
    """arXiv 2508.10751, equations of the analytical derivation."""
    wrong = size - right
    rate = 1 - comb(wrong, k) / comb(size, k)
    deviation = (rate * (1 - rate)) ** 0.5
    found = BestOfK(k=k, analytic=True).rollout_advantages(make_group_rewards(*[1.0] * right, *[0.0] * wrong)).tolist()
    if deviation == 0:
        assert found == pytest.approx([0.0] * size, abs=1e-9)
        return
    up, down = (1 - rate) / deviation, (1 - rate - comb(wrong - 1, k - 1) / comb(size - 1, k - 1)) / deviation
    assert found == pytest.approx([up] * right + [down] * wrong, rel=1e-5)
    assert sum(found) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("rate", [0.1, 0.6])
@pytest.mark.parametrize(("size", "k"), [(4, 4), (5, 2), (5, 3)])
def test_its_expectation_is_the_gradient_of_pass_at_k(size: int, k: int, rate: float) -> None:
    """A policy that succeeds with chance p = sigmoid(theta): d (1 - (1 - p)^k) / d theta = k (1 - p)^(k - 1) p (1 - p), over k rollouts."""
    expected = 0.0
    for successes in range(size + 1):
        credit = BestOfK(k=k).rollout_advantages(make_group_rewards(*[1.0] * successes, *[0.0] * (size - successes))).tolist()
        score = [1 - rate] * successes + [-rate] * (size - successes)
        chance = comb(size, successes) * rate**successes * (1 - rate) ** (size - successes)
        expected += chance * sum(a * b for a, b in zip(credit, score, strict=True)) / size
    assert expected == pytest.approx((1 - rate) ** (k - 1) * rate * (1 - rate), rel=1e-9)


def test_k_must_fit_the_group() -> None:
    assert list(PassAtK().validate(Plan(group_size=8, max_staleness=1))) == []
    assert len(list(PassAtK(advantage=BestOfK(k=9)).validate(Plan(group_size=8)))) == 1
    assert len(list(PassAtK(advantage=BestOfK(analytic=True)).validate(Plan(group_size=8)))) == 1
    assert list(PassAtK(advantage=BestOfK(k=4, analytic=True)).validate(Plan(group_size=8))) == []
    with pytest.raises(ValueError, match="at least 2"):
        BestOfK(k=1)
    assert torch.equal(BestOfK().rollout_advantages(make_group_rewards(1.0)), torch.zeros(1, dtype=torch.float64))
