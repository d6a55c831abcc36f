"""Reward models: Bradley-Terry with margin and centering, and regression."""

from __future__ import annotations

import math

import pytest
import torch

from strop.algorithms.base import ValueOutputs
from strop.algorithms.supervised.reward_model import RewardModel
from strop.data.splitting import select_rollouts
from strop.types import Batch
from support.recorded import recorded_group
from support.rollouts import pack_for

GROUPS = [
    recorded_group([4, 5], [6, 7], [8], rewards=(3.0, 0.0)),
    recorded_group([9], [10], [11, 12, 13], rewards=(1.0, 0.5), index=1),
]
SCORES = torch.tensor([1.0, -0.5, 0.25, 0.75], dtype=torch.float64)


def nll(value: float) -> float:
    return math.log(1 + math.exp(-value))


def loss_of(algorithm: RewardModel, batch: Batch | None = None) -> tuple[float, dict[str, float]]:
    value, logged = algorithm.loss(ValueOutputs(SCORES), batch or pack_for(GROUPS, algorithm))
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


def test_the_margin_is_the_difference_of_the_pairs_rewards() -> None:
    assert loss_of(RewardModel(use_margin=True))[0] == pytest.approx((nll(1.5 - 3.0) + nll(-0.5 - 0.5)) / 2, rel=1e-12)


def test_centering_adds_the_square_of_the_sum() -> None:
    plain = loss_of(RewardModel())[0]
    assert loss_of(RewardModel(centering=0.01))[0] == pytest.approx(plain + 0.01 * (0.5**2 + 1.0**2) / 2, rel=1e-12)


def test_regression_fits_each_rollouts_reward_in_groups_of_any_size() -> None:
    value, logged = loss_of(RewardModel(kind="regression"))
    assert value == pytest.approx((2.0**2 + 0.5**2 + 0.75**2 + 0.25**2) / 4, rel=1e-12)
    assert "accuracy" not in logged
    group = recorded_group([4], [5], [6], [7], rewards=(0.5, 1.0, 2.0))
    batch = pack_for([group], RewardModel(kind="regression"))
    value, _ = RewardModel(kind="regression").loss(ValueOutputs(torch.zeros(3)), batch)
    assert float(value) == pytest.approx((0.25 + 1.0 + 4.0) / 3)


@pytest.mark.parametrize(
    "algorithm", [RewardModel(), RewardModel(use_margin=True, centering=0.1), RewardModel(kind="regression")]
)
def test_parts_add_up_to_the_whole(algorithm: RewardModel) -> None:
    batch = pack_for(GROUPS, algorithm)
    whole, logged = loss_of(algorithm, batch)
    parts = [select_rollouts(batch, sequences) for sequences in ([2, 3], [0, 1])]
    found = [algorithm.loss(ValueOutputs(SCORES[part.index]), part.batch) for part in parts]
    assert sum(float(value) for value, _ in found) == pytest.approx(whole, rel=1e-12)
    for name, value in logged.items():
        assert sum(part[name].value for _, part in found) == pytest.approx(value, rel=1e-12), name


def test_the_scores_of_a_pair_move_apart() -> None:
    scores = SCORES.clone().requires_grad_()
    RewardModel().loss(ValueOutputs(scores), pack_for(GROUPS, RewardModel()))[0].backward()
    assert scores.grad is not None
    assert (scores.grad < 0).tolist() == [True, False, True, False]
    assert float(scores.grad.sum()) == pytest.approx(0.0, abs=1e-15)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="a negative weight drives scores away from 0"):
        RewardModel(centering=-0.1)
    with pytest.raises(ValueError, match="apply to pairs, but kind regression fits single scores"):
        RewardModel(kind="regression", use_margin=True)
    with pytest.raises(ValueError, match="a group of 3 rollouts"):
        pack_for([recorded_group([4], [5], [6], [7], rewards=(0.0,) * 3)], RewardModel())
    with pytest.raises(ValueError, match="7 scores for 4 rollouts"):
        RewardModel().loss(ValueOutputs(torch.zeros(7)), pack_for(GROUPS, RewardModel()))
