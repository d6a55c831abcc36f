"""DAPO: its higher upper clip, its filter, and how a response loses reward near the length limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.advantages.dapo import DAPO
from strop.algorithms.policy_gradient.overlong import SoftOverlong
from strop.types import Ending, Group
from support.rollouts import make_group, make_rollout, sampled_turn
from support.tokens import loss_gradients, make_step


def shaped(part: SoftOverlong, reward: float, length: int, truncated: bool = False) -> float:
    lengths = torch.tensor([length], dtype=torch.float64)
    return float(part.shape(torch.tensor([reward], dtype=torch.float64), lengths, torch.tensor([truncated])))


def answered(*answers: tuple[float, int], ending: Ending = Ending.STOP) -> Group:
    return make_group(
        *(make_rollout([5], sampled_turn([7] * length), reward=reward, ending=ending) for reward, length in answers)
    )


@pytest.mark.parametrize(("length", "punishment"), [(0, 0.0), (60, 0.0), (61, 0.025), (80, 0.5), (100, 1.0), (140, 1.0)])
def test_the_punishment_grows_over_the_buffer(length: int, punishment: float) -> None:
    part = SoftOverlong(buffer=40, penalty=1.0, max_length=100)
    assert shaped(part, 1.0, length) == pytest.approx(1.0 - punishment)
    assert shaped(replace(part, penalty=0.5), 0.0, length) == pytest.approx(-0.5 * punishment)


def test_without_a_length_nothing_is_punished() -> None:
    assert shaped(SoftOverlong(), 1.0, 10_000_000) == 1.0


def test_a_truncated_rollout_can_lose_a_share_of_its_reward_too() -> None:
    part = SoftOverlong(buffer=40, max_length=100, truncated_factor=0.5)
    assert shaped(part, 1.0, 80, truncated=True) == pytest.approx(0.5 - 0.5)
    assert shaped(part, 1.0, 80) == pytest.approx(1.0 - 0.5)


@pytest.mark.parametrize(
    "options", [{"buffer": 0}, {"penalty": -1.0}, {"buffer": 50, "max_length": 40}, {"truncated_factor": 1.5}]
)
def test_punishments_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"set|must"):
        SoftOverlong(**options)  # type: ignore[arg-type]


def test_the_baseline_sees_the_punished_rewards() -> None:
    algorithm = DAPO(shaping=SoftOverlong(buffer=4, max_length=8))
    group = answered((1.0, 2), (1.0, 6))
    assert algorithm.rewards(group).tolist() == [1.0, 0.5]
    assert algorithm.advantages(group).tolist() == pytest.approx([1.0, -1.0], rel=1e-5)


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


def test_it_runs_at_any_age_but_not_on_groups_of_one() -> None:
    assert list(DAPO().validate(Plan(group_size=8, max_staleness=4, optimizer_steps=4))) == []
    assert len(list(DAPO().validate(Plan(group_size=1)))) == 2
