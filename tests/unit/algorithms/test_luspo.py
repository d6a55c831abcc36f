"""LUSPO: GSPO without its preference for the short."""

from __future__ import annotations

import pytest

from strop.algorithms.base import Plan
from strop.algorithms.gspo import GSPO
from strop.algorithms.luspo import LUSPO
from support.tokens import slopes, step_of


def test_a_rollout_weighs_as_much_as_it_is_long() -> None:
    before, now = [[-1.0] * 4, [-1.0]], [[-1.0001, -0.9998, -1.0, -1.0], [-1.00005]]
    step = step_of(now, [1.0, -1.0], before=before)
    _, mean, _ = slopes(GSPO(), step)
    _, total, _ = slopes(LUSPO(), step)
    assert total == pytest.approx([4 * value for value in mean[:4]] + mean[4:])


def test_it_fits_groups_of_any_age() -> None:
    assert list(LUSPO().problems(Plan(group_size=4, max_staleness=2, optimizer_steps=4))) == []
