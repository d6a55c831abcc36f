"""Online DPO: which rollouts are a pair, which groups have none, and what a run of one rollout a group is told."""

from __future__ import annotations

import pytest
import torch

from strop.algorithms.base import Plan
from strop.algorithms.catalogue import all_algorithms
from strop.algorithms.preference.online.online_dpo import OnlineDPO
from strop.runs.algorithm.sections import find_section
from strop.types import Group
from support.rollouts import make_group, make_rollout, pack_for, sampled_turn


def group(*rewards: float) -> Group:
    return make_group(*(make_rollout([1, 2], sampled_turn([3, 4]), reward=reward) for reward in rewards))


@pytest.mark.parametrize(
    ("rewards", "sides"),
    [
        ((0.0, 1.0), [-1, 1]),
        ((0.5, 1.0, 0.0, 0.7), [0, 1, -1, 0]),
        ((1.0, 0.0, 1.0, 0.0), [1, -1, 0, 0]),  # the first of equal ones
        ((1.0, 1.0, 1.0), [0, 0, 0]),
        ((0.1 + 0.2, 0.3), [0, 0]),  # a rounding error is no preference
    ],
)
def test_the_best_rollout_of_a_group_is_chosen_and_the_worst_rejected(rewards: tuple[float, ...], sides: list[int]) -> None:
    algorithm = OnlineDPO()
    assert algorithm.advantages(group(*rewards)).tolist() == sides
    assert algorithm.rollout_mask(group(*rewards)).tolist() == [side != 0 for side in sides]


def test_a_group_without_a_difference_does_not_count_and_is_replaced_on_request() -> None:
    algorithm = OnlineDPO()
    batch = pack_for([group(1.0, 0.0), group(1.0, 1.0), group(0.0, 2.0)], algorithm)
    assert batch.totals.groups == 2 and algorithm.report(batch) == {"train/pairs": 2.0}
    assert algorithm.zero_gradient(batch).tolist() == [False, False, True, True, False, False]
    assert algorithm.keep(group(1.0, 1.0))
    dynamic = OnlineDPO(drop_constant_groups=True)
    assert not dynamic.keep(group(1.0, 1.0)) and dynamic.keep(group(1.0, 0.0))


def test_it_learns_from_rollouts_and_needs_two_of_a_group() -> None:
    assert find_section("online_dpo") == "grpo" and all_algorithms()["online_dpo"] is OnlineDPO
    assert list(OnlineDPO().validate(Plan(group_size=2))) == []
    (problem,) = OnlineDPO().validate(Plan(group_size=1))
    assert "raise num_generations_per_prompt to 2 or more" in problem


def test_a_step_without_any_pair_has_a_loss_of_zero() -> None:
    from strop.algorithms.base import TokenOutputs

    algorithm = OnlineDPO()
    batch = pack_for([group(1.0, 1.0)], algorithm)
    logprobs = torch.full((4,), -0.5, requires_grad=True)
    loss, logged = algorithm.loss(TokenOutputs(logprobs, logprobs), batch.with_column("reference_logprobs", torch.zeros(4)))
    assert loss.item() == 0 and logged["accuracy"].value == 0
