"""A curriculum over a mixture of environments: shares stay exact, groups are observed, and the state travels in checkpoints."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.data.data_state import DataState
from strop.environments.arithmetic import Arithmetic
from strop.environments.handle import LocalEnvironment
from strop.environments.mixture import Component, Mixture
from strop.extensions.curriculum.curriculum_config import CurriculumConfig
from strop.extensions.curriculum.curriculum_keys_config import DifficultyConfig, SuccessRateConfig
from strop.rollouts.episode import make_failed_group
from strop.trainer.step_metrics import environment_metrics
from strop.types import Group, Rollout, Task

SUMS = Arithmetic()


class Overridden(Arithmetic):
    def accuracy(self, rollout: Rollout) -> float:
        raise RuntimeError("no idea")


def component(name: str, size: int, weight: float | None = None, environment: Any = SUMS) -> Component:
    return Component(
        name, LocalEnvironment(environment), [Task(id=f"{name}{n}", metadata={"level": n}) for n in range(size)], weight
    )


def mixture(*components: Component, slots: int = 4, groups: int = 4, **options: Any) -> Mixture:
    config = CurriculumConfig(**{"name": "success_rate", **options})
    return Mixture(components, seed=3).with_order(config, {}, slots=slots, groups_per_step=groups)


def group(source: Mixture, index: int, *rewards: float | None, name: str = "correct") -> Group:
    """A group of the task at a position; a reward of None is a rollout that failed."""
    alias, _, task = source.at(index)
    rollouts = tuple(
        Rollout(
            task=task,
            sample=sample,
            seed=sample,
            messages=(),
            prompt=torch.zeros(0, dtype=torch.int64),
            rewards={} if value is None else {name: value},
            error="it failed" if value is None else None,
        )
        for sample, value in enumerate(rewards)
    )
    return Group(index=index, environment=alias, version=0, rollouts=rollouts)


def observed(source: Mixture, index: int, *rewards: float | None, **options: Any) -> Group:
    made = group(source, index, *rewards, **options)
    source.observe(made)
    return made


def rates(source: Mixture, entry: int = 0) -> dict[int, float | None]:
    """The success rate of each task with an outcome that a later position may depend on; None: it failed with an error."""
    state, size = source.state()["curriculum"]["entries"][entry], source.state()["curriculum"]["sizes"][entry]
    failed = [task for task, until in state["resting"] if until - state["draws"] > size / 2]  # not drawn again for an epoch
    return dict.fromkeys(failed) | {task: right / (right + wrong) for task, right, wrong, _ in state["seen"]}


def test_outcomes_are_the_accuracy_of_the_rollouts_that_did_not_fail() -> None:
    source = mixture(component("a", 6), slots=3)
    tasks = [
        int(observed(source, index, *rewards).task.id[1:]) for index, rewards in enumerate([(1, 0), (1, None), (None, None)])
    ]
    for index in (3, 4, 5):
        source.at(index)
    assert rates(source) == {tasks[0]: 0.5, tasks[1]: 1.0, tasks[2]: None}


def test_a_reward_by_its_name_is_the_score() -> None:
    source = mixture(component("a", 6), slots=1, reward="neat")
    first = int(observed(source, 0, 0.25, 0.75, name="neat").task.id[1:])
    second = int(observed(source, 1, 1.0, 1.0).task.id[1:])  # without that reward
    source.at(2)
    assert rates(source) == {first: 0.5, second: None}


def test_a_task_that_could_not_be_created_is_a_failure() -> None:
    source = mixture(component("a", 6), slots=1)
    failed = source.at(0)[2]
    source.observe(make_failed_group(0, 0, ValueError("damaged")))
    source.at(1)
    assert rates(source) == {int(failed.id[1:]): None}


def test_an_accuracy_that_raises_is_no_result_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    source = mixture(component("a", 6, environment=Overridden()), slots=1)
    with caplog.at_level(logging.WARNING):
        made = observed(source, 0, 1.0)
    source.at(1)
    assert "Overridden.accuracy raised RuntimeError('no idea')" in caplog.text
    assert list(rates(source).values()) == [None] and made.rollouts[0].metrics


def test_metrics_of_the_choice_are_logged_beside_those_of_the_environments() -> None:
    source = mixture(component("a", 4), component("b", 4), slots=2)
    groups = [observed(source, index, 1.0, 0.0) for index in range(4)]
    groups[0].rollouts[0].metrics["place"] = 3.0
    logged = environment_metrics(groups)
    place = f"environments/{groups[0].environment}/place"
    assert set(logged) == {place, *(f"curriculum/{name}" for name in ("never_seen", "solved", "impossible", "entropy"))}
    assert logged["curriculum/never_seen"] == (1 + 1 + 0.75 + 0.75) / 4


def test_without_a_curriculum_nothing_is_observed() -> None:
    source = Mixture((component("a", 4),))
    assert observed(source, 0, 1.0).rollouts[0].metrics == {} and not source.resumable and source.state() == {}


def test_the_state_travels_in_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Mixture:
        return mixture(component("a", 20, 2.0), component("b", 9, 1.0), success_rate=SuccessRateConfig(repeats=1))

    source, again = make(), make()
    assert source.resumable
    for index in range(30):
        observed(source, index, *([1.0, 0.0][: 1 + index % 2]))
    DataState(source).save(tmp_path / "data")
    DataState(again).load(tmp_path / "data")
    for each in (source, again):
        for index in range(30, 60):
            observed(each, index, float(index % 3 == 0), 1.0)
    assert [source.at(index)[2].id for index in range(50, 60)] == [again.at(index)[2].id for index in range(50, 60)]
    assert json.dumps(source.state()) == json.dumps(again.state())
    with caplog.at_level(logging.WARNING):
        make().load_state({})
    assert "no state of a curriculum" in caplog.text


def test_each_entry_goes_from_easy_to_hard() -> None:
    difficulty = DifficultyConfig(by="level", start=0.2, steps=5)
    source = mixture(component("a", 40), component("b", 20), name="difficulty", difficulty=difficulty, groups=6, slots=6)
    for step in range(5):
        places = [source.at(index) for index in range(6 * step, 6 * step + 6)]
        reached = 0.2 + 0.8 * step / 5
        for name, _, task in places:
            assert task.metadata["level"] < math.ceil(reached * (40 if name == "a" else 20) - 1e-9)
    usual = Mixture(source.components, seed=3)
    assert [source.at(index)[2].id for index in range(30, 90)] == [usual.at(index)[2].id for index in range(30, 90)]


# --- quotas ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scored_by", [None, "correct"])
def test_a_rollout_that_cannot_be_scored_is_no_outcome_of_its_task(scored_by: str | None) -> None:
    """It has a reward of 0 that stands for none: the curriculum learns what it would learn of the others alone."""
    with_it, without = (mixture(component("a", 5), reward=scored_by) for _ in range(2))
    for index in range(12):
        rewards = (1.0, 0.0, 1.0) if index % 2 else (1.0,)
        made = group(with_it, index, *rewards, 0.0, 1.0)
        lost = [replace(each, unscored=True, reward=0.0) if each.sample >= len(rewards) else each for each in made.rollouts]
        with_it.observe(replace(made, rollouts=tuple(lost)))
        observed(without, index, *rewards)
        assert with_it.at(index)[2].id == without.at(index)[2].id
    assert with_it.state() == without.state()
