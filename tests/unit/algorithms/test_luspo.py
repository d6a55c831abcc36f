"""LUSPO: GSPO without its preference for the short."""

from __future__ import annotations

import pytest

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.objectives.gspo import GSPO
from strop.algorithms.policy_gradient.objectives.luspo import LUSPO
from support.tokens import loss_gradients, make_step


def test_a_rollout_weighs_as_much_as_it_is_long() -> None:
    before, now = [[-1.0] * 4, [-1.0]], [[-1.0001, -0.9998, -1.0, -1.0], [-1.00005]]
    step = make_step(now, [1.0, -1.0], old=before)
    _, mean, _ = loss_gradients(GSPO(), step)
    _, total, _ = loss_gradients(LUSPO(), step)
    assert total == pytest.approx([4 * value for value in mean[:4]] + mean[4:])


def test_it_fits_groups_of_any_age() -> None:
    assert list(LUSPO().validate(Plan(group_size=4, max_staleness=2, optimizer_steps=4))) == []
