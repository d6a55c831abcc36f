"""Losses beside those of TRL's trainers: the same numbers in, the same value and gradient out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.beside_trl import (
    CONTRASTIVE,
    PAIRED,
    Found,
    draw,
    sft_weight_of,
    through_cpo_trainer,
    through_dpo_trainer,
    through_kto_trainer,
    through_strop,
)
from support.each import each

pytest.importorskip("trl")


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@each("case", PAIRED)
def test_a_loss_over_pairs_is_that_of_trl(case: tuple[str, str, dict[str, Any], dict[str, Any]]) -> None:
    loss_type, name, options, own = case
    tokens = draw()
    assert_same(through_strop(name, options | own, tokens), through_dpo_trainer(loss_type, options, tokens))


def test_an_alpha_divergence_is_that_of_trl() -> None:
    """TRL computes it in float32 only."""
    tokens, options = draw(torch.float32), {"beta": 0.3, "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7}
    assert_same(through_strop("dpo", options, tokens), through_dpo_trainer("sigmoid", options, tokens), rtol=1e-5)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_a_loss_over_judgements_is_that_of_trl(loss_type: str) -> None:
    tokens, options = draw(), {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    assert_same(through_strop(loss_type, options, tokens, judged=True), through_kto_trainer(loss_type, options, tokens))


@each("case", CONTRASTIVE)
def test_a_loss_without_a_reference_is_that_of_trl(case: tuple[str, dict[str, Any], dict[str, Any], bool]) -> None:
    name, options, theirs, averaged = case
    tokens = draw()
    wanted = through_cpo_trainer(name, theirs, averaged, tokens)
    assert_same(through_strop(name, {"beta": 0.7, "sft_weight": sft_weight_of(name), **options}, tokens), wanted)


def assert_same(found: Found, wanted: Found, rtol: float = 1e-9) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=rtol)
    torch.testing.assert_close(found[1], wanted[1], rtol=rtol, atol=rtol)
