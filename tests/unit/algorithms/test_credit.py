"""The credit of rollouts, collected from what an algorithm defines for one group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from strop.algorithms.policy_gradient.grpo import GRPO
from strop.types import Group, RolloutCredit
from support.rollouts import pack_for, simple_groups

GROUPS = simple_groups((4, (3, 1)), (2, (2, 5, 1)))


@dataclass(frozen=True, kw_only=True)
class Lengths(GRPO):
    """Its three methods return what can be told apart."""

    def rewards(self, group: Group) -> Tensor:
        return group.lengths.float()

    def advantages(self, group: Group) -> Tensor:
        return group.lengths - group.lengths.mean()

    def rollout_mask(self, group: Group) -> Tensor:
        return group.lengths > 1


def test_credit_is_what_the_methods_return_for_each_group() -> None:
    credit = Lengths().group_credit(GROUPS)
    assert credit.rewards.tolist() == [3, 1, 2, 5, 1] and credit.rewards.dtype == torch.float64
    assert credit.advantages.tolist() == pytest.approx([1, -1, -2 / 3, 7 / 3, -5 / 3])
    assert credit.mask.tolist() == [True, False, True, True, False] and credit.predict == "tokens"


def test_an_algorithm_of_whole_rollouts_gives_credit_to_their_last_token() -> None:
    RewardModel = pytest.importorskip("strop.extensions.recorded.supervised").RewardModel
    assert RewardModel(kind="regression").group_credit(GROUPS).predict == "last_token"
    assert len(pack_for(GROUPS, RewardModel(kind="regression")).target) == 5


def test_credit_may_compare_groups() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Whole(Lengths):
        def group_credit(self, groups: Sequence[Group]) -> RolloutCredit:
            credit = super().group_credit(groups)
            return RolloutCredit(rewards=credit.rewards, advantages=credit.rewards - credit.rewards.mean(), mask=credit.mask)

    assert pack_for(GROUPS, Whole()).advantages[:4].tolist() == pytest.approx([0.6, 0.6, 0.6, -1.4])


@dataclass(frozen=True, kw_only=True)
class OneForAll(GRPO):
    def advantages(self, group: Group) -> Tensor:
        return group.rewards.mean()


def test_a_value_too_few_names_the_method() -> None:
    with pytest.raises(
        ValueError, match=r"OneForAll.advantages returned a tensor of shape \(\) for 2 rollouts; return one value"
    ):
        OneForAll().group_credit(GROUPS)
