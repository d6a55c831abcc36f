"""What holds for every algorithm of the family, whatever its parts, and the covariance of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithm_factory import all_algorithms
from strop.algorithms.base import TokenOutputs
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.types import Batch, Ending, Group
from support.algorithms import find_part
from support.each import each
from support.rollouts import make_group, make_rollout, pack_for, sampled_turn
from support.tokens import Step, evaluate_objective, make_step

NEEDED: dict[str, dict[str, Any]] = {
    "dr_grpo": {"constant_length": 7},
    "gdpo": {"advantage": find_part("decoupled_rewards", weights={"first": 1.0, "second": 0.5})},
    "clip_cov": {"objective": find_part("covariance_clip", share=0.2, lowest=0.1)},
}


FAMILY: dict[str, PolicyGradient] = {
    name: kind(**NEEDED.get(name, {})) for name, kind in all_algorithms().items() if issubclass(kind, PolicyGradient)
}


def answered(*answers: tuple[float, int], ending: Ending = Ending.STOP) -> Group:
    """(reward, length) of each rollout; the greedy one fails."""
    rollouts = [
        replace(
            make_rollout([5], sampled_turn([7] * length), reward=reward, ending=ending),
            rewards={"first": reward, "second": reward},
        )
        for reward, length in answers
    ]
    return replace(make_group(*rollouts), baseline=replace(rollouts[0], reward=0.0))


def loss_and_slope(
    algorithm: PolicyGradient, groups: Sequence[Group], *, now: float, before: float = -2.0, sampler: float = -2.0
) -> tuple[Batch, float, Tensor]:
    """In float32, as a run has it: log-probabilities that spread around ``now``, ``before`` and ``sampler``."""
    batch = pack_for(groups, algorithm)
    count = len(batch.target)
    spread = torch.linspace(-0.3, 0.3, count)
    columns = {name: torch.full((count,), -2.0) for name in algorithm.requires}
    batch = replace(batch, rollout_logprobs=sampler - spread.flip(0)).with_columns(
        {**columns, "policy_logprobs": before - spread}
    )
    batch = algorithm.token_credit(batch)
    logprobs, entropy = (now + spread).requires_grad_(), torch.ones(count)
    seen = TokenOutputs(logprobs.detach(), entropy)
    batch = algorithm.prepare_step(batch, seen if algorithm.needs_step_outputs else None)
    loss, _ = algorithm.loss(TokenOutputs(logprobs, entropy), batch)
    loss.backward()
    assert logprobs.grad is not None
    return batch, float(loss.detach()), logprobs.grad


@each("name", FAMILY)
@each("now, before, sampler", [(-1.0, -500.0, -300.0), (-500.0, -1.0, -1.0), (-1e-6, -1e5, -1e-6)])
def test_extreme_ratios_leave_loss_and_gradient_finite(name: str, now: float, before: float, sampler: float) -> None:
    groups = [answered((1.0, 2), (0.0, 3)), answered((0.0, 2), (0.0, 2)), answered((0.0, 9), (1.0, 1))]
    _, loss, slope = loss_and_slope(FAMILY[name], groups, now=now, before=before, sampler=sampler)
    assert torch.isfinite(torch.tensor(loss))
    assert bool(torch.isfinite(slope).all())


@each("name", FAMILY)
def test_the_order_of_rollouts_and_groups_does_not_matter(name: str) -> None:
    """Each keeps its credit: rewards, lengths and the batch's statistics are what counts."""
    algorithm = replace(FAMILY[name], kl=None)
    first, second = [(1.0, 2), (0.0, 3), (0.5, 1)], [(0.0, 4), (1.0, 1), (1.0, 2)]

    def credit(groups: Sequence[Sequence[tuple[float, int]]]) -> list[tuple[float, ...]]:
        batch = pack_for([answered(*group) for group in groups], algorithm)
        columns = {name: torch.full((len(batch.target),), -2.0) for name in algorithm.requires}
        batch = algorithm.token_credit(batch.with_columns(columns))
        rows = [
            tuple(round(value, 5) for value in batch.advantages[batch.sequence == row].tolist())
            for row in range(batch.num_sequences)
        ]
        return sorted(rows)

    assert credit([first, second]) == credit([second[::-1], [first[1], first[0], first[2]]])


def spread(size: int = 40) -> Step:
    """Two rollouts, one praised and one blamed, log-probabilities falling from 0 to -8."""
    falling = [-8 * place / size for place in range(size)]
    return make_step([falling, falling], [2.0, -2.0])


def test_the_draw_is_the_same_in_a_repeated_run_and_another_for_other_tokens() -> None:
    CovarianceClip = pytest.importorskip("strop.extensions.policy_gradients.entropy").CovarianceClip
    step = spread()
    again = evaluate_objective(CovarianceClip(share=0.05), spread()).columns
    torch.manual_seed(1)
    assert evaluate_objective(CovarianceClip(share=0.05), step).columns == again
    other = replace(step, batch=replace(step.batch, target=step.batch.target + 3))
    assert evaluate_objective(CovarianceClip(share=0.05), other).columns != again


def test_tokens_the_clip_already_holds_are_not_chosen() -> None:
    CovarianceClip = pytest.importorskip("strop.extensions.policy_gradients.entropy").CovarianceClip
    now = [[0.0, -4.0, -4.0], [0.0, -4.0, -4.0]]
    step = make_step(now, [2.0, -2.0], old=[[-1.0, -4.0, -4.0], [0.0, -4.0, -4.0]])
    found = evaluate_objective(CovarianceClip(share=1.0, lowest=0.1, highest=99.0), step)
    assert found.columns["ratio_clipped"][0] == 1.0
    assert found.columns["covariance_clipped"] == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]


def test_at_least_one_token_is_held_back_in_the_smallest_step() -> None:
    entropy = pytest.importorskip("strop.extensions.policy_gradients.entropy")
    CovarianceKl, CovarianceClip = entropy.CovarianceKl, entropy.CovarianceClip
    step = make_step([[-0.1, -4.0], [-0.1, -4.0]], [2.0, -2.0], old=[[-0.1, -4.0], [-0.1, -4.0]])
    assert sum(evaluate_objective(CovarianceKl(), step).columns["covariance_penalised"]) == 1
    assert sum(evaluate_objective(CovarianceClip(), step).columns["covariance_clipped"]) == 1
