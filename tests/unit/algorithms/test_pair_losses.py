"""Each loss over pairs: its value by hand, its value at the reference, its slope, and what it does far away from both."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.catalogue import all_algorithms
from strop.algorithms.preference.apo_down import APODown
from strop.algorithms.preference.apo_zero import APOZero
from strop.algorithms.preference.base import PairwisePreference
from strop.algorithms.preference.cdpo import CDPO
from strop.algorithms.preference.dpo import DPO
from strop.algorithms.preference.ipo import IPO
from strop.algorithms.preference.reference_free.orpo import ORPO, log_odds
from strop.algorithms.preference.reference_free.simpo import SimPO
from strop.algorithms.preference.robust_dpo import RobustDPO
from strop.algorithms.preference.slic import SLiC

FAMILY: dict[str, PairwisePreference] = {
    "dpo": DPO(),
    "cdpo": CDPO(),
    "robust_dpo": RobustDPO(),
    "ipo": IPO(),
    "slic": SLiC(),
    "simpo": SimPO(),
    "orpo": ORPO(),
    "apo_zero": APOZero(),
    "apo_down": APODown(),
}


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def compare(algorithm: PairwisePreference, chosen: float, rejected: float) -> float:
    return float(algorithm.pair_loss(*(torch.tensor([value], dtype=torch.float64) for value in (chosen, rejected))))


def odds(logprob: float) -> float:
    return math.exp(logprob) / (1 - math.exp(logprob))


@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    [
        (DPO(beta=0.5), -math.log(sigmoid(0.5 * 1.2))),
        (CDPO(beta=0.5, label_smoothing=0.2), -0.8 * math.log(sigmoid(0.6)) - 0.2 * math.log(sigmoid(-0.6))),
        (RobustDPO(beta=0.5, label_smoothing=0.2), (-0.8 * math.log(sigmoid(0.6)) + 0.2 * math.log(sigmoid(-0.6))) / 0.6),
        (IPO(beta=0.5), (1.2 - 1.0) ** 2),
        (SLiC(beta=0.5), 1 - 0.6),
        (SimPO(beta=2.0, gamma=0.7), -math.log(sigmoid(2.4 - 0.7))),
        (ORPO(), -math.log(sigmoid(math.log(odds(-0.3)) - math.log(odds(-1.5))))),
        (APOZero(beta=0.5), 1 - sigmoid(-0.15) + sigmoid(-0.75)),
        (APODown(beta=0.5), sigmoid(-0.15) + 1 - sigmoid(0.6)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PairwisePreference) else "",
)
def test_the_loss_of_a_pair_is_the_formula(algorithm: PairwisePreference, wanted: float) -> None:
    assert compare(algorithm, -0.3, -1.5) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    [
        (DPO(), math.log(2)),
        (CDPO(label_smoothing=0.3), math.log(2)),
        (RobustDPO(label_smoothing=0.3), math.log(2)),
        (IPO(beta=0.25), 4.0),
        (SLiC(), 1.0),
        (APOZero(), 1.0),
        (APODown(), 1.0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PairwisePreference) else "",
)
def test_the_loss_at_the_reference_is_known(algorithm: PairwisePreference, wanted: float) -> None:
    assert compare(algorithm, 0.0, 0.0) == pytest.approx(wanted, rel=1e-12)


def slopes(algorithm: PairwisePreference, chosen: float, rejected: float) -> tuple[float, float]:
    values = [torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (chosen, rejected)]
    algorithm.pair_loss(*values).sum().backward()
    found = [value.grad for value in values]
    assert all(isinstance(slope, Tensor) for slope in found)
    return float(found[0]), float(found[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILY)
def test_a_step_down_the_slope_widens_the_gap(name: str) -> None:
    chosen, rejected = slopes(FAMILY[name], -0.9, -3.0)
    assert chosen < rejected, "the chosen completion gains on the rejected one"
    if name == "apo_down":
        assert chosen > 0, "both become less likely"
    else:
        assert chosen < 0 < rejected


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("gap", [50.0, 1e4])
def test_far_from_the_reference_losses_and_slopes_are_finite(name: str, gap: float) -> None:
    for chosen, rejected in ((-1.0, -1.0 - gap), (-1.0 - gap, -1.0), (-1.0 - gap, -1.0 - gap)):
        assert math.isfinite(compare(FAMILY[name], chosen, rejected))
        assert all(math.isfinite(slope) for slope in slopes(FAMILY[name], chosen, rejected))


def test_the_log_odds_keep_their_digits_near_certainty_and_near_impossibility() -> None:
    assert float(log_odds(torch.tensor(-1e-6, dtype=torch.float64))) == pytest.approx(math.log(1e6) - 5e-7, rel=1e-9)
    assert float(log_odds(torch.tensor(-800.0, dtype=torch.float64))) == pytest.approx(-800.0)
    assert float(log_odds(torch.tensor(math.log(0.5), dtype=torch.float64))) == pytest.approx(0.0, abs=1e-15)
    certain = torch.tensor([0.0, -800.0, -0.6, -0.8], dtype=torch.float64, requires_grad=True)
    log_odds(certain).sum().backward()
    assert certain.grad is not None
    assert bool(torch.isfinite(certain.grad).all())
    assert certain.grad[2:].tolist() == pytest.approx([1 / (1 - math.exp(-0.6)), 1 / (1 - math.exp(-0.8))], rel=1e-12)


def test_smoothing_of_nothing_is_plain_dpo() -> None:
    for kind in (CDPO, RobustDPO):
        assert compare(kind(label_smoothing=0.0), 0.4, -2.0) == pytest.approx(compare(DPO(), 0.4, -2.0), rel=1e-12)


def test_robust_dpo_is_unbiased_under_flipped_labels() -> None:
    """The mean over labels that are flipped at the rate e is DPO's loss on the true ones."""
    rate, algorithm = 0.2, RobustDPO(label_smoothing=0.2)
    mean = (1 - rate) * compare(algorithm, 3.0, -1.0) + rate * compare(algorithm, -1.0, 3.0)
    assert mean == pytest.approx(compare(DPO(), 3.0, -1.0), rel=1e-12)


def test_conservative_dpo_is_least_where_the_gap_says_how_sure_the_labels_are() -> None:
    algorithm = CDPO(beta=0.5, label_smoothing=0.2)
    best = math.log(0.8 / 0.2) / 0.5
    assert slopes(algorithm, best, 0.0) == pytest.approx((0.0, 0.0), abs=1e-12)
    assert compare(algorithm, best, 0.0) < min(compare(algorithm, best - 0.1, 0.0), compare(algorithm, best + 0.1, 0.0))


def test_a_hinge_that_is_satisfied_has_no_slope() -> None:
    assert slopes(SLiC(beta=0.5), 3.0, 0.5) == (0.0, 0.0)
    assert slopes(SLiC(beta=0.5), 1.0, 0.5) == (-0.5, 0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPO(beta=0.0), "beta is 0.0: it must be above 0"),
        (lambda: SimPO(beta=-1.0), "beta is -1.0"),
        (lambda: SimPO(gamma=-0.1), "gamma is -0.1"),
        (lambda: CDPO(label_smoothing=0.5), "below 0.5, at which labels contain no information"),
        (lambda: RobustDPO(label_smoothing=-0.1), "label_smoothing is -0.1"),
        (lambda: DPO(preference_weight=0.0), "at least one must be above 0"),
        (lambda: DPO(sft_weight=-1.0), "neither may be negative"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_every_loss_over_pairs_is_in_the_catalogue_under_its_files_name() -> None:
    named = all_algorithms()
    assert {name: named[name] for name in FAMILY} == {name: type(algorithm) for name, algorithm in FAMILY.items()}
    without_reference = {name for name, algorithm in FAMILY.items() if not algorithm.requires}
    assert without_reference == {"simpo", "orpo"}
    assert all(algorithm.recorded_data == "preferences" and algorithm.whole_groups for algorithm in FAMILY.values())
