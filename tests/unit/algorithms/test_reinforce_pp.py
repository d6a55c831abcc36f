"""REINFORCE++ and its baseline variant: credit whitened over the tokens of the batch."""

from __future__ import annotations

import pytest
import torch

from strop.algorithms.base import Plan
from strop.algorithms.functional import whiten
from strop.algorithms.policy_gradient.advantages.reinforce_pp import BatchWhitened, ReinforcePP
from strop.algorithms.policy_gradient.advantages.reinforce_pp_baseline import ReinforcePPBaseline
from strop.types import Ending, Group
from support.rollouts import make_group, make_rollout, pack_for, sampled_turn


def answered(*answers: tuple[float, int], ending: Ending = Ending.STOP) -> Group:
    return make_group(
        *(make_rollout([5], sampled_turn([7] * length), reward=reward, ending=ending) for reward, length in answers)
    )


def test_whitened_credit_has_mean_zero_and_deviation_one_over_tokens() -> None:
    algorithm = ReinforcePP(kl=None)
    credit = algorithm.token_credit(pack_for([answered((1.0, 3), (0.0, 5)), answered((0.5, 2))], algorithm)).advantages.double()
    assert float(credit.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(credit.std(correction=0)) == pytest.approx(1.0, abs=1e-5)
    tokens = [1.0] * 3 + [0.0] * 5 + [0.5] * 2
    mean = sum(tokens) / 10
    deviation = (sum((token - mean) ** 2 for token in tokens) / 10) ** 0.5
    assert credit.tolist() == pytest.approx([(token - mean) / deviation for token in tokens], rel=1e-5)


def test_a_token_pays_for_its_own_kl_term_and_those_after_it() -> None:
    algorithm = ReinforcePP()
    assert algorithm.requires == {"reference_logprobs", "policy_logprobs"}
    batch = pack_for([answered((1.0, 3), (0.0, 2))], algorithm)
    gap = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    batch = batch.with_column("reference_logprobs", batch.rollout_logprobs - gap)
    returns = [1 - 0.01 * 0.6, 1 - 0.01 * 0.5, 1 - 0.01 * 0.3, -0.01 * 0.9, -0.01 * 0.5]
    wanted = whiten(torch.tensor(returns), torch.ones(5)).tolist()
    assert algorithm.token_credit(batch).advantages.tolist() == pytest.approx(wanted, rel=1e-5)


def test_tokens_that_were_filtered_do_not_count_in_the_whitening() -> None:
    algorithm = ReinforcePP(kl=None, overlong_filtering=True)
    groups = [answered((1.0, 2)), answered((0.0, 2)), answered((100.0, 9), ending=Ending.LENGTH)]
    assert algorithm.token_credit(pack_for(groups, algorithm)).advantages[:4].tolist() == pytest.approx([1, 1, -1, -1], rel=1e-5)


def test_the_baseline_variant_subtracts_the_group_s_mean_first() -> None:
    algorithm = ReinforcePPBaseline(kl=None)
    groups = [answered((11.0, 1), (10.0, 1)), answered((3.0, 1), (0.0, 1))]
    credit = algorithm.token_credit(pack_for(groups, algorithm)).advantages.tolist()
    deviation = ((0.5**2 + 1.5**2) / 2) ** 0.5
    assert credit == pytest.approx([0.5 / deviation, -0.5 / deviation, 1.5 / deviation, -1.5 / deviation], rel=1e-5)


def test_its_kl_term_is_k2_in_the_loss() -> None:
    kl = ReinforcePPBaseline().kl
    assert kl is not None
    assert (kl.estimator, kl.place) == ("k2", "loss")


@pytest.mark.parametrize("algorithm", [ReinforcePP(kl=None), ReinforcePPBaseline(kl=None)])
def test_a_batch_that_does_not_vary_earns_exactly_nothing(algorithm: ReinforcePP) -> None:
    batch = algorithm.token_credit(pack_for([answered((0.1, 3), (0.1, 1)), answered((0.1, 2), (0.1, 2))], algorithm))
    assert torch.equal(batch.advantages, torch.zeros(8))


def test_only_the_baseline_variant_needs_groups() -> None:
    assert list(ReinforcePP().validate(Plan(group_size=1))) == []
    assert len(list(ReinforcePPBaseline().validate(Plan(group_size=1)))) == 1
    assert list(ReinforcePPBaseline().validate(Plan(group_size=2, max_staleness=2, optimizer_steps=3))) == []


def test_whitening_nothing_is_harmless() -> None:
    assert whiten(torch.ones(3), torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    assert len(whiten(torch.zeros(0), torch.zeros(0))) == 0
    assert BatchWhitened().min_group_size == 2
