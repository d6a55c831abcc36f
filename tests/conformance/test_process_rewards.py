"""Rewards of steps: the credit that process supervision and PRIME give to tokens, and what a critic's credit is computed from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conformance import formulas_steps as formulas
from conformance.cases import Step, step
from conformance.compose import algorithm, part
from conformance.harness import SINGLE, groups_of
from strop.algorithms.critic import TOKEN_REWARDS, VALUES
from strop.algorithms.policy_gradient.turns import make_step_columns, sum_to_go
from strop.types import Batch, Group, StepReward
from support.rollouts import pack_for

LENGTHS = [[3, 5, 2], [4, 1, 6]]
STEPS = [
    [[(0, 0.5), (2, 1.0)], [(1, 0.0), (3, 0.25), (4, 1.0)], [(1, -0.5)]],
    [[(3, 0.3)], [(0, 0.3)], [(2, 0.3), (5, 0.3)]],  # equal: no signal
]
OUTCOMES = [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]


def with_steps(outcomes: list[list[float]]) -> list[Group]:
    """Groups whose rollouts have the rewards of STEPS beside these outcomes."""
    rollouts: Step = step("steps", LENGTHS, outcomes)
    return [
        replace(group, rollouts=tuple(
            replace(rollout, reward=rollout.reward + sum(reward for _, reward in steps),
                    step_rewards=tuple(StepReward(token, reward) for token, reward in steps))
            for rollout, steps in zip(group.rollouts, of_group, strict=True)
        ))
        for group, of_group in zip(groups_of(rollouts), STEPS, strict=True)
    ]  # fmt: skip


def packed(groups: list[Group], name: str, **options: object) -> Batch:
    subject = algorithm(name, **options)
    batch = pack_for(groups, subject)
    batch = batch.with_columns(make_step_columns(batch, groups))
    return subject.token_credit(batch.with_column(VALUES, torch.linspace(-1, 1, len(batch.target))))


def flat(credit: list[list[list[float]]]) -> Tensor:
    return torch.tensor([value for group in credit for tokens in group for value in tokens])


def test_process_supervision_is_the_sum_of_later_steps_normalised_over_their_group() -> None:
    found = packed(with_steps([[0.0] * 3] * 2), "process_supervision").advantages
    wanted = [formulas.process_supervision(steps, lengths) for steps, lengths in zip(STEPS, LENGTHS, strict=True)]
    torch.testing.assert_close(found, flat(wanted), rtol=SINGLE, atol=SINGLE)
    assert found[0] != found[2] and not found[10:].any()


def test_outcomes_have_grpos_advantage_beside_that_of_steps() -> None:
    alone = packed(with_steps([[0.0] * 3] * 2), "process_supervision").advantages
    both = packed(with_steps(OUTCOMES), "process_supervision")
    outcomes = pack_for(groups_of(step("steps", LENGTHS, OUTCOMES)), algorithm("grpo"))
    torch.testing.assert_close(both.advantages, alone + outcomes.advantages, rtol=SINGLE, atol=SINGLE)


def test_leave_one_out_without_a_deviation_is_primes_sum() -> None:
    groups = with_steps(OUTCOMES)[:1]
    found = packed(groups, "process_supervision", advantage=part("step_relative", leave_one_out=True, normalize=False))
    wanted = [formulas.prime(STEPS[0], OUTCOMES[0], LENGTHS[0])]
    torch.testing.assert_close(found.advantages, flat(wanted), rtol=SINGLE, atol=SINGLE)


@pytest.mark.parametrize("name", ["ppo", "vapo"])
def test_a_critics_credit_has_the_reward_of_a_step_where_the_step_ends(name: str) -> None:
    groups = with_steps(OUTCOMES)
    batch = packed(groups, name)
    totals = [rollout.reward for group in groups for rollout in group.rollouts]
    every, lengths = [steps for group in STEPS for steps in group], [length for group in LENGTHS for length in group]
    wanted = [formulas.token_rewards(*given) for given in zip(every, totals, lengths, strict=True)]
    torch.testing.assert_close(batch.column(TOKEN_REWARDS), flat([wanted]))


def test_without_rewards_of_steps_process_supervision_is_grpo() -> None:
    groups = groups_of(step("steps", LENGTHS, OUTCOMES))
    torch.testing.assert_close(packed(groups, "process_supervision").advantages, packed(groups, "grpo").advantages)


def test_an_algorithm_that_gives_no_credit_to_steps_counts_their_sum() -> None:
    groups = with_steps(OUTCOMES)
    totals = [rollout.reward for group in groups for rollout in group.rollouts]
    summed = groups_of(step("steps", LENGTHS, [totals[:3], totals[3:]]))
    assert torch.equal(packed(groups, "grpo").advantages, packed(summed, "grpo").advantages)


def test_a_sum_to_go_ends_with_its_rollout() -> None:
    batch = pack_for(groups_of(step("steps", [[2, 3]], [[0.0, 1.0]])), algorithm("grpo"))
    assert sum_to_go(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), batch).tolist() == [3.0, 2.0, 28.0, 24.0, 16.0]
