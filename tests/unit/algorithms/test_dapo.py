"""DAPO: its higher upper clip, its filter, and how a response loses reward near the length limit."""

from __future__ import annotations

import pytest

from strop.algorithms.policy_gradient.advantages.dapo import DAPO
from strop.algorithms.policy_gradient.overlong import SoftOverlong
from strop.types import Ending, Group
from support.rollouts import make_group, make_rollout, sampled_turn
from support.tokens import loss_gradients, make_step


def answered(*answers: tuple[float, int], ending: Ending = Ending.STOP) -> Group:
    return make_group(
        *(make_rollout([5], sampled_turn([7] * length), reward=reward, ending=ending) for reward, length in answers)
    )


def test_a_group_of_nothing_but_successes_is_replaced_however_long_they_are() -> None:
    """The paper filters by accuracy; the punishment does not make a solved task worth keeping."""
    algorithm = DAPO(shaping=SoftOverlong(buffer=4, max_length=8))
    assert not algorithm.keep(answered((1.0, 2), (1.0, 6)))
    assert algorithm.keep(answered((1.0, 2), (0.0, 2)))


def test_the_upper_clip_is_higher_than_the_lower() -> None:
    before, now = [[-1.0, -1.0], [-1.0, -1.0]], [[-1.0 + 0.24, -1.0 + 0.25], [-1.0 - 0.22, -1.0 - 0.23]]
    _, slope, logged = loss_gradients(DAPO(), make_step(now, [1.0, -1.0], old=before))
    assert [value != 0 for value in slope] == [True, False, True, False]
    assert logged["ratio_clipped"] == pytest.approx(0.5)
