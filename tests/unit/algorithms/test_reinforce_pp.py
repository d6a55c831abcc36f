"""REINFORCE++ and its baseline variant: credit whitened over the tokens of the batch."""

from __future__ import annotations

import pytest
import torch

from strop.algorithms.functional import whiten
from strop.algorithms.policy_gradient.advantages.reinforce_pp import BatchWhitened, ReinforcePP
from strop.algorithms.policy_gradient.advantages.reinforce_pp_baseline import ReinforcePPBaseline
from strop.types import Ending, Group
from support.rollouts import make_group, make_rollout, pack_for, sampled_turn


def answered(*answers: tuple[float, int], ending: Ending = Ending.STOP) -> Group:
    return make_group(
        *(make_rollout([5], sampled_turn([7] * length), reward=reward, ending=ending) for reward, length in answers)
    )


@pytest.mark.parametrize("algorithm", [ReinforcePP(kl=None), ReinforcePPBaseline(kl=None)])
def test_a_batch_that_does_not_vary_earns_exactly_nothing(algorithm: ReinforcePP) -> None:
    batch = algorithm.token_credit(pack_for([answered((0.1, 3), (0.1, 1)), answered((0.1, 2), (0.1, 2))], algorithm))
    assert torch.equal(batch.advantages, torch.zeros(8))


def test_whitening_nothing_is_harmless() -> None:
    assert whiten(torch.ones(3), torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    assert len(whiten(torch.zeros(0), torch.zeros(0))) == 0
    assert BatchWhitened().min_group_size == 2
