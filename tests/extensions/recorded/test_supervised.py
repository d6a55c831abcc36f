"""SFT and reward models: metrics and edges, which the formulas of tests/conformance leave open."""

from __future__ import annotations

import math

import pytest
import torch

from strop.algorithms.base import TokenOutputs, ValueOutputs
from strop.data.splitting import select_rollouts
from strop.extensions.recorded.supervised import SFT, RewardModel
from strop.types import Batch, observation_turn
from support.recorded import recorded_group, recorded_turn
from support.rollouts import make_group, make_rollout, pack_for

EXAMPLES = [recorded_group([5, 6], [7], rewards=(0.0,)), recorded_group([5, 6], [8, 9, 10], rewards=(0.0,), index=1)]


def test_rewards_change_nothing_and_tokens_of_others_are_not_taught() -> None:
    rollout = make_rollout([5], recorded_turn([6, 7]), observation_turn([8, 9, 10], ""), recorded_turn([11]), reward=-3.0)
    batch = pack_for([make_group(rollout)], SFT())
    assert batch.target.tolist() == [6, 7, 11]
    assert batch.totals.tokens == 3
    outputs = TokenOutputs(torch.tensor([-1.0, -2.0, -3.0]), torch.zeros(3))
    assert float(SFT().loss(outputs, batch)[0]) == pytest.approx(2.0)
    assert SFT(dft=True).loss(outputs, batch)[1]["nll"].value == pytest.approx(2.0)


def test_a_part_without_a_taught_token_has_a_loss_of_zero() -> None:
    """An empty example may be alone in its micro-batch."""
    batch = pack_for([*EXAMPLES, recorded_group([4, 5], [], rewards=(0.0,), index=2)], SFT())
    empty = select_rollouts(batch, [2]).batch
    nothing = torch.zeros(0, requires_grad=True)
    value, logged = SFT().loss(TokenOutputs(nothing, nothing), empty)
    assert float(value.detach()) == 0.0
    assert logged["loss"].value == 0.0


PAIRS = [
    recorded_group([4, 5], [6, 7], [8], rewards=(3.0, 0.0)),
    recorded_group([9], [10], [11, 12, 13], rewards=(1.0, 0.5), index=1),
]


SCORES = torch.tensor([1.0, -0.5, 0.25, 0.75], dtype=torch.float64)


def nll(value: float) -> float:
    return math.log(1 + math.exp(-value))


def loss_of(algorithm: RewardModel, batch: Batch | None = None) -> tuple[float, dict[str, float]]:
    value, logged = algorithm.loss(ValueOutputs(SCORES), batch or pack_for(PAIRS, algorithm))
    return float(value), {name: metric.value for name, metric in logged.items()}


def test_the_loss_of_a_pair_is_that_of_bradley_and_terry() -> None:
    value, logged = loss_of(RewardModel())
    assert value == pytest.approx((nll(1.5) + nll(-0.5)) / 2, rel=1e-12)
    assert logged == pytest.approx(
        {
            "loss": value,
            "accuracy": 0.5,
            "margin": (1.5 - 0.5) / 2,
            "scores_mean": 1.5 / 4,
            "scores_mean_square": float((SCORES**2).mean()),
            "scores_chosen_mean": 1.25 / 2,
            "scores_rejected_mean": 0.25 / 2,
        }
    )


def test_regression_fits_each_rollouts_reward_in_groups_of_any_size() -> None:
    assert "accuracy" not in loss_of(RewardModel(kind="regression"))[1]
    group = recorded_group([4], [5], [6], [7], rewards=(0.5, 1.0, 2.0))
    batch = pack_for([group], RewardModel(kind="regression"))
    value, _ = RewardModel(kind="regression").loss(ValueOutputs(torch.zeros(3)), batch)
    assert float(value) == pytest.approx((0.25 + 1.0 + 4.0) / 3)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="a negative weight drives scores away from 0"):
        RewardModel(centering=-0.1)
    with pytest.raises(ValueError, match="apply to pairs, but kind regression fits single scores"):
        RewardModel(kind="regression", use_margin=True)
    with pytest.raises(ValueError, match="a group of 3 rollouts"):
        pack_for([recorded_group([4], [5], [6], [7], rewards=(0.0,) * 3)], RewardModel())
    with pytest.raises(ValueError, match="7 scores for 4 rollouts"):
        RewardModel().loss(ValueOutputs(torch.zeros(7)), pack_for(PAIRS, RewardModel()))
