"""Which task stands where in the stream, from the position alone."""

from __future__ import annotations

from collections import Counter

import pytest

from strop.data.sources.source import DataSource
from strop.data.task_order import permute_index
from strop.environments.arithmetic import Arithmetic
from strop.environments.base import EnvironmentConfigError
from strop.environments.handle import LocalEnvironment
from strop.environments.mixture import Component, Mixture
from strop.types import Task

ENVIRONMENT = Arithmetic()


def component(name: str, size: int, weight: float | None = None) -> Component:
    return Component(name, LocalEnvironment(ENVIRONMENT), [Task(id=f"{name}{index}") for index in range(size)], weight)


def ids(mixture: Mixture, start: int, end: int) -> list[str]:
    return [mixture.at(index)[2].id for index in range(start, end)]


def test_the_stream_has_each_environment_by_its_weight_and_is_the_same_from_any_position():
    mixture, again = (Mixture((component("a", 50, 1), component("b", 20, 2.5)), seed=9) for _ in range(2))
    assert Counter(mixture.at(index)[0] for index in range(70)) == {"a": 20, "b": 50}
    assert ids(mixture, 0, 300)[211:] == ids(again, 211, 300)
    assert ids(mixture, 0, 70) != ids(Mixture(mixture.components, seed=10), 0, 70)


def test_shuffling_does_not_leave_tasks_where_they_were():
    moved = [permute_index(index, 1000, 7) for index in range(1000)]
    assert sum(index == place for index, place in enumerate(moved)) < 10
    assert abs(sum(place for place in moved[:500]) / 500 - 499.5) < 60


def test_without_shuffling_the_order_is_the_data_s():
    assert ids(Mixture((component("a", 4),), shuffle=False), 0, 5) == ["a0", "a1", "a2", "a3", "a0"]


def test_the_stream_ends_after_the_last_epoch():
    mixture = Mixture((component("a", 4),), max_epochs=2)
    mixture.at(7)
    with pytest.raises(IndexError, match="2 epochs of 4 tasks"):
        mixture.at(8)


def test_far_positions_are_found_at_once():
    tasks = ENVIRONMENT.tasks(DataSource(size=10**9))
    name, environment, task = Mixture((Component("sums", LocalEnvironment(ENVIRONMENT), tasks),)).at(10**12)
    assert name == "sums" and environment == LocalEnvironment(ENVIRONMENT) and task.answer


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ((), "no environment"),
        ((component("a", 0),), "a has no tasks"),
        ((component("a", 1, 1.0), component("b", 1)), "give each one or none"),
        ((component("a", 1, 0.0),), "must be positive"),
        ((component("a", 1, float("nan")),), "must be positive"),
    ],
)
def test_mixtures_that_make_no_sense_are_errors(components, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        Mixture(components)
