"""SFT and DFT on batches small enough to work out by hand."""

from __future__ import annotations

import pytest
import torch

from strop.algorithms.base import TokenOutputs
from strop.algorithms.supervised.sft import SFT
from strop.data.splitting import select_rollouts
from strop.types import observation_turn
from support.recorded import recorded_group, recorded_turn
from support.rollouts import make_group, make_rollout, pack_for

GROUPS = [recorded_group([5, 6], [7], rewards=(0.0,)), recorded_group([5, 6], [8, 9, 10], rewards=(0.0,), index=1)]


def test_rewards_change_nothing_and_tokens_of_others_are_not_taught() -> None:
    rollout = make_rollout([5], recorded_turn([6, 7]), observation_turn([8, 9, 10], ""), recorded_turn([11]), reward=-3.0)
    batch = pack_for([make_group(rollout)], SFT())
    assert batch.target.tolist() == [6, 7, 11]
    assert batch.totals.tokens == 3
    value, _ = SFT().loss(TokenOutputs(torch.tensor([-1.0, -2.0, -3.0]), torch.zeros(3)), batch)
    assert float(value) == pytest.approx(2.0)


def test_a_part_without_a_taught_token_has_a_loss_of_zero() -> None:
    """An empty example may be alone in its micro-batch."""
    batch = pack_for([*GROUPS, recorded_group([4, 5], [], rewards=(0.0,), index=2)], SFT())
    empty = select_rollouts(batch, [2]).batch
    nothing = torch.zeros(0, requires_grad=True)
    value, logged = SFT().loss(TokenOutputs(nothing, nothing), empty)
    assert float(value.detach()) == 0.0
    assert logged["loss"].value == 0.0
