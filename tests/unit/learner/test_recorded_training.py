"""Everything that learns from recorded data learns on a tiny task, and the first losses are those the formulas give."""

from __future__ import annotations

import copy
import math
from functools import cache

import pytest
import torch

from strop.algorithms.base import Algorithm
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.algorithms.preference.apo_down import APODown
from strop.algorithms.preference.apo_zero import APOZero
from strop.algorithms.preference.cdpo import CDPO
from strop.algorithms.preference.dpo import DPO
from strop.algorithms.preference.ipo import IPO
from strop.algorithms.preference.reference_free.orpo import ORPO
from strop.algorithms.preference.reference_free.simpo import SimPO
from strop.algorithms.preference.robust_dpo import RobustDPO
from strop.algorithms.preference.slic import SLiC
from strop.algorithms.preference.unpaired.kto import KTO
from strop.algorithms.supervised.reward_model import RewardModel
from strop.algorithms.supervised.sft import SFT
from strop.learner.client import AsyncColumnSource, LogprobColumn
from strop.learner.torch.scorer import NetworkScorer
from strop.models.network import Network
from strop.models.value_network import ValueNetwork
from strop.sampling import Sampling
from support.clients import scorer_client
from support.models import build
from support.recorded import build_classifier, make_learner, random_groups, train_steps
from support.sweep import sweep

pytestmark = pytest.mark.slow

PAIRS = random_groups(8)


def trained(algorithm: Algorithm, steps: int, *, groups: int = 8, completions: int = 2) -> list[dict[str, float]]:
    """The metrics of steps on the same few groups, against a frozen copy where a reference is needed."""
    model = build_classifier("llama") if algorithm.predict == "last_token" else build("llama")
    network = ValueNetwork(model) if algorithm.predict == "last_token" else Network(model)
    learner = make_learner(network, algorithm, train_tokens=400)  # each step in one pass
    scorers: list[AsyncColumnSource] = []
    if REFERENCE_LOGPROBS in algorithm.requires:
        frozen = Network(copy.deepcopy(model), packed=network.packed)
        scorers = [LogprobColumn(REFERENCE_LOGPROBS, scorer_client(NetworkScorer(frozen, Sampling(), score_tokens=50)))]
    return train_steps(learner, algorithm, random_groups(groups, completions), steps, scorers)


@pytest.mark.parametrize(
    "algorithm", sweep([SFT(), SFT(dft=True), SFT(aggregation="sequence_mean")], SFT()), ids=["sft", "dft", "sequences"]
)
def test_sft_overfits_eight_examples(algorithm: SFT) -> None:
    logged = trained(algorithm, 60, completions=1)
    assert logged[0]["nll"] > 4
    assert logged[-1]["nll"] < (0.5 if not algorithm.dft else 2.5), "DFT leaves alone what the policy finds unlikely"


def test_the_first_loss_of_dpo_is_log_2_and_its_accuracy_rises_to_1() -> None:
    logged = trained(DPO(beta=0.1), 25)
    assert logged[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(logged[0]["margin"]) < 1e-5
    assert logged[-1]["accuracy"] == 1.0
    assert logged[-1]["margin"] > 0.5
    assert logged[-1]["loss"] < 0.5


@pytest.mark.parametrize(
    ("algorithm", "first"),
    [
        pytest.param(CDPO(), math.log(2), marks=pytest.mark.exhaustive),
        pytest.param(RobustDPO(), math.log(2), marks=pytest.mark.exhaustive),
        (IPO(beta=0.5), 1.0),
        pytest.param(SLiC(), 1.0, marks=pytest.mark.exhaustive),
        pytest.param(APOZero(), 1.0, marks=pytest.mark.exhaustive),
        pytest.param(APODown(), 1.0, marks=pytest.mark.exhaustive),
        (DPO(sft_weight=0.2), None),
        pytest.param(SimPO(), None, marks=pytest.mark.exhaustive),
        (ORPO(), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else "",
)
def test_the_losses_over_pairs_fall_and_the_pairs_are_told_apart(algorithm: Algorithm, first: float | None) -> None:
    logged = trained(algorithm, 30)
    if first is not None:
        assert logged[0]["loss"] == pytest.approx(first, abs=1e-5)
    assert logged[-1]["loss"] < logged[0]["loss"] - 0.05
    assert logged[-1]["accuracy"] == 1.0
    assert logged[-1]["margin"] > logged[0]["margin"]


def test_kto_parts_the_desirable_from_the_undesirable() -> None:
    """At the reference every h is 0 and so is the reference point: each completion has a loss of a half."""
    logged = trained(KTO(), 30)
    assert logged[0]["loss"] == pytest.approx(0.5, abs=1e-5)
    assert logged[0]["reference_point"] == pytest.approx(0.0, abs=1e-5)
    assert logged[-1]["loss"] < 0.4
    assert logged[-1]["rewards_desirable"] > 0.3 > -0.3 > logged[-1]["rewards_undesirable"]


@cache
def reward_model(centering: float) -> list[dict[str, float]]:
    return trained(RewardModel(centering=centering), 40)


@pytest.mark.parametrize("algorithm", [RewardModel(), RewardModel(centering=0.01)], ids=["plain", "centred"])
def test_the_accuracy_of_a_reward_model_rises_to_1(algorithm: RewardModel) -> None:
    logged = reward_model(algorithm.centering)[:30]
    assert logged[0]["accuracy"] < 1.0
    assert logged[-1]["accuracy"] == 1.0
    assert logged[-1]["loss"] < 0.3
    assert logged[-1]["scores_chosen_mean"] > logged[-1]["scores_rejected_mean"] + 1


def test_centering_keeps_scores_around_zero() -> None:
    shifted = [reward_model(weight)[-1]["scores_mean"] for weight in (0.0, 1.0)]
    assert abs(shifted[1]) < 0.05 < abs(shifted[0])


@pytest.mark.exhaustive
def test_a_regression_fits_its_targets() -> None:
    logged = trained(RewardModel(kind="regression"), 60)
    assert logged[-1]["loss"] < 0.02 < logged[0]["loss"]


def test_training_is_the_same_twice() -> None:
    assert trained(DPO(sft_weight=0.1), 3) == trained(DPO(sft_weight=0.1), 3)
    torch.manual_seed(5)
    assert trained(KTO(), 3) == trained(KTO(), 3)
