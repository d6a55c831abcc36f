"""Each loss over pairs: its value by hand, its value at the reference, its slope, and what it does far away from both."""

from __future__ import annotations

import math

import pytest
import torch

from strop.algorithms.preference.reference_free.orpo import log_odds


def test_the_log_odds_keep_their_digits_near_certainty_and_near_impossibility() -> None:
    assert float(log_odds(torch.tensor(-1e-6, dtype=torch.float64))) == pytest.approx(math.log(1e6) - 5e-7, rel=1e-9)
    assert float(log_odds(torch.tensor(-800.0, dtype=torch.float64))) == pytest.approx(-800.0)
    assert float(log_odds(torch.tensor(math.log(0.5), dtype=torch.float64))) == pytest.approx(0.0, abs=1e-15)
    certain = torch.tensor([0.0, -800.0, -0.6, -0.8], dtype=torch.float64, requires_grad=True)
    log_odds(certain).sum().backward()
    assert certain.grad is not None
    assert bool(torch.isfinite(certain.grad).all())
    assert certain.grad[2:].tolist() == pytest.approx([1 / (1 - math.exp(-0.6)), 1 / (1 - math.exp(-0.8))], rel=1e-12)
