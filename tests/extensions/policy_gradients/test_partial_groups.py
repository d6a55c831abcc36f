"""Rollouts that fail by no fault of the policy: the gradient of the others is unbiased, for each advantage of the catalogue.

The policy draws an action with probability ``P``; its reward is ``REWARDS[action]``. Expectations are sums over all outcomes of a batch of
two groups, so they are exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

from strop.algorithm_factory import all_algorithms, all_parts
from strop.algorithms.functional import POLICY_LOGPROBS, POLICY_SQUARES
from strop.algorithms.policy_gradient.grpo import GroupRelative
from strop.algorithms.policy_gradient.parts import Advantage
from strop.data.packing import pack
from strop.endings import Ending
from strop.extensions.policy_gradients.group_credit import BestOfK, DecoupledRewards
from strop.types import Group
from support.rollouts import make_rollout, sampled_turn

P, REWARDS, SIZE, LEAST = 0.3, (0.25, 1.0), 4, 2
TRUE = P * (1 - P) * (REWARDS[1] - REWARDS[0])  # the derivative of the mean reward by the logit
RATES = (0.0, 0.05, 0.15, 0.3)
Counts = tuple[int, int]  # rollouts of a group with each action; the others failed

# Advantages whose mean gradient is that of the mean reward in groups of any size, so that it does not matter which rollouts are missing.
UNBIASED: dict[str, Advantage] = {
    "plain_reward": all_parts()["plain_reward"](),
    "leave_one_out": all_parts()["leave_one_out"](),
    "greedy_baseline": all_parts()["greedy_baseline"](),
    "group_relative, leave-one-out, not normalised": GroupRelative(leave_one_out=True, normalize=False),
}
# Their mean gradient differs from that in groups without failures too, and depends on the size: they subtract a mean that contains the own
# reward, divide by a deviation or a mean that was drawn, or ascend another objective.
BIASED_BY_NATURE: dict[str, Advantage] = {
    "batch_scaled": all_parts()["batch_scaled"](),
    "batch_whitened": all_parts()["batch_whitened"](),
    "best_of_k": BestOfK(k=2),
    "decoupled_rewards": DecoupledRewards(weights={"own": 1.0}),
    "group_relative": GroupRelative(),
    "group_relative, not normalised": GroupRelative(normalize=False),
    "length_weighted": all_parts()["length_weighted"](),
    "optimal_token_baseline": all_parts()["optimal_token_baseline"](),
    "success_rate": all_parts()["success_rate"](),
}
# These give credit to single tokens, turns or steps, from columns or step rewards that the bandit has not. They too are computed from the
# groups that are packed, which failed rollouts are not in.
OF_TOKENS = {"bi_level_gae", "discounted_turns", "gae", "reverse_kl", "step_grouped", "step_relative"}
EVERY = {**UNBIASED, **BIASED_BY_NATURE}


def make_group(counts: Counts, index: int, failed: int) -> Group:
    actions: list[int | None] = [0] * counts[0] + [1] * counts[1] + [None] * failed
    rollouts = [
        replace(make_rollout([1], sampled_turn([7]), ending=Ending.ENGINE), error="lost")
        if action is None
        else replace(
            make_rollout([1], sampled_turn([4 + action], [math.log((1 - P, P)[action])]), reward=REWARDS[action]),
            rewards={"own": REWARDS[action]},
        )
        for action in actions
    ]
    numbered = [replace(rollout, sample=place) for place, rollout in enumerate(rollouts)]
    greedy = make_rollout([1], sampled_turn([4]), reward=REWARDS[0])
    return Group(index=index, environment="bandit", version=0, rollouts=tuple(numbered[::-1]), baseline=greedy)


def credit(advantage: Advantage, groups: list[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantages of the tokens, and the actions."""
    REINFORCE = pytest.importorskip("strop.extensions.policy_gradients.baselines").REINFORCE
    algorithm = REINFORCE(advantage=advantage)
    batch = pack(groups, algorithm.group_credit(groups), share_prefixes=True)
    if POLICY_SQUARES in advantage.requires:
        squares = torch.full_like(batch.rollout_logprobs, math.log(P**2 + (1 - P) ** 2))
        batch = replace(batch, columns={**batch.columns, POLICY_LOGPROBS: batch.rollout_logprobs, POLICY_SQUARES: squares})
    batch = algorithm.token_credit(batch)
    return batch.advantages.double(), batch.target - 4


@cache
def estimate(name: str, first: Counts, second: Counts) -> float:
    """Return the gradient that a batch of these two groups gives: the mean over its rollouts of advantage x score."""
    groups = [make_group(counts, index, SIZE - sum(counts)).leave_out_failed() for index, counts in enumerate((first, second))]
    assert [len(group.rollouts) for group in groups] == [sum(first), sum(second)]
    advantages, actions = credit(EVERY[name], groups)
    return float((advantages * (actions - P)).mean())


def outcomes() -> Iterator[Counts]:
    return ((zeros, ones) for zeros, ones in itertools.product(range(SIZE + 1), repeat=2) if LEAST <= zeros + ones <= SIZE)


def chance_of(counts: Counts) -> float:
    """Return the probability of these actions in a group of which so many are present."""
    return math.comb(sum(counts), counts[1]) * P ** counts[1] * (1 - P) ** counts[0]


def chance_of_size(size: int, rate: float) -> float:
    kept = sum(math.comb(SIZE, each) * (1 - rate) ** each * rate ** (SIZE - each) for each in range(LEAST, SIZE + 1))
    return math.comb(SIZE, size) * (1 - rate) ** size * rate ** (SIZE - size) / kept


@cache
def mean_of_sizes(name: str, first: int, second: int) -> float:
    """Return the mean gradient of full groups of these sizes."""
    pairs = itertools.product(outcomes(), repeat=2)
    return sum(
        chance_of(a) * chance_of(b) * estimate(name, *sorted((a, b))) for a, b in pairs if (sum(a), sum(b)) == (first, second)
    )


def mean_gradient(name: str, rate: float) -> float:
    sizes = itertools.product(range(LEAST, SIZE + 1), repeat=2)
    return sum(chance_of_size(a, rate) * chance_of_size(b, rate) * mean_of_sizes(name, a, b) for a, b in sizes)


def test_every_advantage_of_the_catalogue_is_examined() -> None:
    known = {name for name, part in all_parts().items() if issubclass(part, Advantage)}
    assert known == {name.partition(",")[0] for name in EVERY} | OF_TOKENS
    assert {"rloo", "reinforce", "remax"} <= set(all_algorithms())


@pytest.mark.parametrize("name", EVERY)
def test_a_group_with_failures_gets_the_credit_of_the_smaller_group(name: str) -> None:
    for counts in outcomes():
        others = (2, 3)
        partial = [make_group(counts, 0, SIZE - sum(counts)).leave_out_failed(), make_group(others, 1, 0)]
        smaller = [make_group(counts, 0, 0), make_group(others, 1, 0)]
        for ours, theirs in zip(credit(EVERY[name], partial), credit(EVERY[name], smaller), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", UNBIASED)
def test_the_mean_gradient_is_that_of_the_mean_reward_at_any_rate_of_failures(name: str, rate: float) -> None:
    assert mean_gradient(name, rate) == pytest.approx(TRUE, abs=1e-7)  # advantages are float32


@pytest.mark.parametrize("name", BIASED_BY_NATURE)
def test_what_is_biased_with_failures_is_so_in_full_groups_and_by_no_more_than_smaller_ones(name: str) -> None:
    full = [mean_of_sizes(name, size, size) for size in range(LEAST, SIZE + 1)]
    assert abs(full[-1] - TRUE) > 1e-3
    for rate in RATES[1:]:
        assert min(full) - 0.02 * abs(TRUE) <= mean_gradient(name, rate) <= max(full) + 0.02 * abs(TRUE)


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("rate", RATES)
def test_the_mean_of_a_hundred_thousand_draws_agrees_and_varies_as_smaller_groups_do(name: str, rate: float) -> None:
    draws = 100_000
    pairs = list(itertools.product(outcomes(), repeat=2))
    chances = [chance_of(a) * chance_of(b) * chance_of_size(sum(a), rate) * chance_of_size(sum(b), rate) for a, b in pairs]
    values = torch.tensor([estimate(name, *sorted(pair)) for pair in pairs], dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    drawn = values[torch.multinomial(torch.tensor(chances, dtype=torch.float64), draws, replacement=True, generator=generator)]
    variance = sum(chance * (float(value) - TRUE) ** 2 for chance, value in zip(chances, values, strict=True))
    assert abs(float(drawn.mean()) - TRUE) < 4 * math.sqrt(variance / draws)
    assert float(drawn.var()) == pytest.approx(variance, rel=0.05)


def test_left_out_failures_are_not_the_same_as_zeros() -> None:
    """What training on zeros would do: the failures of the infrastructure drag the gradient away from the true one."""
    failed = make_group((2, 2), 0, 1)
    as_zero = replace(failed, rollouts=tuple(replace(each, error=None) for each in failed.rollouts))
    right, _ = credit(UNBIASED["leave_one_out"], [failed.leave_out_failed()])
    wrong, actions = credit(UNBIASED["leave_one_out"], [as_zero])
    assert len(wrong) == len(right) + 1 and float(wrong[actions == 0].max()) > float(right.min())


def test_code_that_raises_keeps_its_group_whole() -> None:
    """An exception without a cause may follow from what the policy wrote: leaving out its rollout alone could be an escape."""
    group = make_group((2, 2), 0, 1)
    broken = replace(group, rollouts=tuple(replace(each, ending=Ending.ERROR) if each.error else each for each in group.rollouts))
    assert broken.leave_out_failed() is broken and broken.errors == ("lost",)
