"""Which task stands where in the stream, from the position alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.data.interleaving import permute_index
from strop.data.sources.source import DataSource
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


def test_an_epoch_asks_every_task_once_when_no_weights_are_given():
    mixture = Mixture((component("a", 7), component("b", 5), component("c", 1)), seed=3)
    for epoch in range(4):
        seen = ids(mixture, epoch * 13, (epoch + 1) * 13)
        assert len(set(seen)) == 13
    assert ids(mixture, 0, 13) != ids(mixture, 13, 26)


def test_the_stream_is_the_same_from_any_position():
    mixture, again = (Mixture((component("a", 50, 2.5), component("b", 20, 1)), seed=9) for _ in range(2))
    assert ids(mixture, 0, 300)[211:] == ids(again, 211, 300)
    assert ids(mixture, 0, 70) != ids(Mixture(mixture.components, seed=10), 0, 70)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 5000))
def test_every_prefix_has_each_environment_by_its_weight(weights, length):
    mixture = Mixture(tuple(component(str(i), 3, weight) for i, weight in enumerate(weights)))
    counts = Counter(mixture._interleaving._locate_source(index)[0] for index in range(length))
    for i, weight in enumerate(weights):
        assert abs(counts[i] - length * weight / sum(weights)) < len(weights)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=4))
def test_positions_within_an_environment_are_consecutive(weights):
    mixture = Mixture(tuple(component(str(i), 3, weight) for i, weight in enumerate(weights)))
    next_position = Counter()
    for index in range(200):
        chosen, position = mixture._interleaving._locate_source(index)
        assert position == next_position[chosen]
        next_position[chosen] += 1


@given(st.integers(1, 3000), st.integers(0, 2**63))
def test_shuffling_is_a_permutation(size, seed):
    assert sorted(permute_index(index, size, seed) for index in range(size)) == list(range(size))


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
    assert name == "sums" and environment is ENVIRONMENT and task.answer


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
