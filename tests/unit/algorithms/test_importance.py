"""Corrections that multiply by the ratio of learner to sampler: as it is, truncated, or masked; per token and per rollout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from strop.algorithms.policy_gradient.corrections.icepop import Icepop
from strop.algorithms.policy_gradient.corrections.importance import Importance
from strop.algorithms.policy_gradient.corrections.masked import Mis
from strop.algorithms.policy_gradient.corrections.sequence_mask import SequenceMaskTis
from strop.algorithms.policy_gradient.corrections.truncated import Tis
from strop.algorithms.policy_gradient.parts import Correction, Mismatch
from support.mismatch import log_ratios, make_mismatch


def weights_of(correction: Correction, mismatch: Mismatch) -> list[float]:
    return [float(weight) for weight in correction.weights(mismatch)[0]]


def logged_by(correction: Correction, mismatch: Mismatch) -> dict[str, list[float]]:
    return {name: [float(entry) for entry in column] for name, column in correction.weights(mismatch)[1].items()}


def test_importance_sampling_weighs_each_token_by_its_ratio() -> None:
    mismatch = make_mismatch(log_ratios(0.5, 1.0), log_ratios(3.0))
    assert weights_of(Importance(), mismatch) == pytest.approx([0.5, 1.0, 3.0], rel=1e-12)
    assert logged_by(Importance(), mismatch)["importance_weight"] == pytest.approx([0.5, 1.0, 3.0])


def test_on_the_level_of_sequences_every_token_has_the_product_over_its_rollout() -> None:
    mismatch = make_mismatch(log_ratios(0.5, 3.0, 2.0), log_ratios(0.25), log_ratios(1.5, 1.5))
    products = [3.0, 3.0, 3.0, 0.25, 2.25, 2.25]
    assert weights_of(Importance(level="sequence"), mismatch) == pytest.approx(products, rel=1e-12)
    assert weights_of(Tis(cap=2.5, level="sequence"), mismatch) == pytest.approx([2.5] * 3 + products[3:], rel=1e-12)
    assert weights_of(Mis(low=0.5, high=2.5, level="sequence"), mismatch) == pytest.approx([0.0] * 4 + [2.25] * 2, rel=1e-12)


def test_a_product_is_over_counted_tokens_only() -> None:
    """Rollout 0 does not count: its ratios change neither its own weight nor anyone else's."""
    mismatch = make_mismatch(log_ratios(9.0, 9.0), log_ratios(2.0, 0.5, 3.0), kept=[False, True])
    assert weights_of(Importance(level="sequence"), mismatch)[2:] == pytest.approx([3.0] * 3, rel=1e-12)
    assert weights_of(Importance(level="sequence"), mismatch)[:2] == [1.0, 1.0]


def test_truncation_bounds_the_weight_and_says_where() -> None:
    mismatch = make_mismatch(log_ratios(0.1, 1.0, 2.0), log_ratios(2.5))
    assert weights_of(Tis(), mismatch) == pytest.approx([0.1, 1.0, 2.0, 2.0])
    assert logged_by(Tis(cap=2.2), mismatch)["tis_cut"] == [0.0, 0.0, 0.0, 1.0]
    floored = logged_by(Tis(floor=0.5, cap=2.2), mismatch)
    assert floored["tis_weight"] == pytest.approx([0.5, 1.0, 2.0, 2.2])
    assert floored["tis_cut"] == [1.0, 0.0, 0.0, 1.0]


def test_a_truncation_that_is_never_reached_is_importance_sampling() -> None:
    mismatch = make_mismatch(log_ratios(0.1, 1.0, 2.0), log_ratios(250.0))
    assert torch.equal(Tis(cap=math.inf).weights(mismatch)[0], Importance().weights(mismatch)[0])


def test_masking_keeps_the_ratio_inside_the_band_and_nothing_outside() -> None:
    mismatch = make_mismatch(log_ratios(0.49, 0.51, 1.0), log_ratios(4.9, 5.1))
    assert weights_of(Icepop(), mismatch) == pytest.approx([0.0, 0.51, 1.0, 4.9, 0.0])
    assert logged_by(Icepop(), mismatch)["icepop_cut"] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert weights_of(Mis(high=1.5), mismatch) == pytest.approx([0.49, 0.51, 1.0, 0.0, 0.0])
    assert set(logged_by(Mis(), mismatch)) == {"mis_weight", "mis_cut"}


def test_a_ratio_on_the_edge_of_the_band_is_kept() -> None:
    mismatch = make_mismatch([0.0])
    assert weights_of(Mis(low=1.0, high=1.0), mismatch) == [1.0]
    assert weights_of(Mis(low=0.0, high=1.0, level="sequence"), mismatch) == [1.0]


def test_sequence_masks_keep_the_ratios_of_rollouts_whose_geometric_mean_is_in_the_band() -> None:
    """The first rollout's mean is 1, though its tokens are far from it; the second's is 2."""
    mismatch = make_mismatch(log_ratios(4.0, 0.25), log_ratios(2.0, 2.0))
    found = SequenceMaskTis(low=0.5, high=1.5)
    assert weights_of(found, mismatch) == pytest.approx([4.0, 0.25, 0.0, 0.0])
    capped = SequenceMaskTis(low=0.5, high=1.5, cap=3.0)
    assert weights_of(capped, mismatch) == pytest.approx([3.0, 0.25, 0.0, 0.0])
    logged = logged_by(capped, mismatch)
    assert logged["sequence_mask_tis_cut"] == [0.0, 0.0, 1.0, 1.0]
    assert logged["sequence_mask_tis_capped"] == [1.0, 0.0, 0.0, 0.0], "what is dropped is not also capped"
    assert logged["sequence_mask_tis_ratio"] == pytest.approx([1.0, 1.0, 2.0, 2.0])


def test_a_long_rollout_is_multiplied_in_logarithms() -> None:
    """4,000 ratios of 1.1 and then as many of 1 / 1.1: the product is 1, though halfway it is 1e165."""
    mismatch = make_mismatch([math.log(1.1)] * 4000 + [-math.log(1.1)] * 4000, dtype=torch.float32)
    weights = Importance(level="sequence").weights(mismatch)[0]
    assert weights.dtype == torch.float32
    assert torch.allclose(weights, torch.ones(8000), atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Mis, {"low": 2.0, "high": 1.0}, r"w is kept in \[2.0, 1.0\]"),
        (Mis, {"low": -1.0, "high": 1.0}, "which contains no ratio of probabilities"),
        (Icepop, {"high": 0.2}, r"\[0.5, 0.2\]"),
        (SequenceMaskTis, {"high": 0.5}, r"the geometric mean of w is kept in \[0.999, 0.5\]"),
        (SequenceMaskTis, {"cap": 0.0}, "cap is 0.0"),
        (Tis, {"cap": 0.0}, "the cap must be above 0"),
        (Tis, {"cap": 1.0, "floor": 1.5}, "or above the cap"),
    ],
)
def test_empty_ranges_are_refused(kind: type[Correction], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)
