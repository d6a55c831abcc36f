"""Which task stands where with a curriculum: from final results alone, whatever the order in which groups finish."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data.sources.records import DataError
from strop.data.task_order import Interleaving
from strop.extensions.curriculum.base import Choice, Curriculum, Draw, TaskOutcome
from strop.extensions.curriculum.curricula import SuccessRateCurriculum
from strop.extensions.curriculum.curriculum_keys_config import SuccessRateConfig
from strop.extensions.curriculum.task_chooser import KEPT, CurriculumChooser
from strop.rollouts.stream import DropTooOld, EndOfTasks, GroupOrder, RolloutStream, StreamState, Windowed
from strop.sampling import mix_seed, uniform

SIZES = (9, 5)


def chooser(
    slots: int = 6, groups: int = 3, sizes: tuple[int, ...] = SIZES, epochs: int | None = None, **options: Any
) -> CurriculumChooser:
    curricula = [SuccessRateCurriculum(size, SuccessRateConfig(**options)) for size in sizes]
    interleaving = Interleaving(sizes=sizes, weights=(None,) * len(sizes), seed=5, max_epochs=epochs)
    return CurriculumChooser("success_rate", curricula, interleaving, seed=5, slots=slots, groups_per_step=groups)


def result(position: int, place: tuple[int, int]) -> list[float]:
    """What comes of a task at a position: some are solved, some impossible, some fail."""
    if uniform(mix_seed(1, *place), 0) < 0.1:
        return []
    rate = uniform(mix_seed(2, *place), 0) * 1.6 - 0.3
    return [float(uniform(mix_seed(3, *place), 100 * position + sample) < rate) for sample in range(4)]


def play(
    tasks: CurriculumChooser,
    wait: Callable[[int], int],
    *,
    slots: int = 6,
    groups: int = 3,
    positions: int = 60,
    order: GroupOrder | None = None,
    state: StreamState | None = None,
    refill: bool = True,
) -> tuple[dict[int, tuple[int, int]], StreamState]:
    """Play a stream whose groups finish after ``wait(position)`` turns of the event loop. Groups without signal are dropped.

    Return the task of every position that was started, and the state of the stream when the positions are used up."""
    found: dict[int, tuple[int, int]] = {}
    version = [0]

    async def run(index: int) -> Any:
        found[index] = tasks.locate(index)
        for _ in range(wait(index)):
            await asyncio.sleep(0)
        scores = result(index, found[index])
        tasks.record(index, scores)
        return SimpleNamespace(index=index, scores=scores, version=version[0])

    async def whole() -> StreamState:
        stream = RolloutStream(
            run, slots=slots, size=positions, refill_on_release=refill, order=order, state=state, version=lambda: version[0]
        )
        kept = 0
        while True:
            try:
                group = await stream.next()
            except EndOfTasks:
                return stream.state()
            if len(set(group.scores)) < 2:
                stream.release(1)
                continue
            kept += 1
            if kept == groups:
                kept, version[0] = 0, version[0] + 1
                stream.release(groups)

    return found, asyncio.run(whole())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=60, max_size=60), st.integers(3, 9))
def test_the_tasks_do_not_depend_on_when_groups_finish(waits: list[int], slots: int) -> None:
    wanted, _ = play(chooser(slots), lambda index: 0, slots=slots)
    found, _ = play(chooser(slots), lambda index: waits[index], slots=slots)
    assert found == wanted and sorted(found) == list(range(60))


def test_the_tasks_depend_on_results() -> None:
    tasks, other = chooser(), chooser()
    for position in range(60):
        tasks.record(position, result(position, tasks.locate(position)))
        other.record(position, [0.0, 1.0] if other.locate(position) else [])
    places = [[each.locate(position) for position in range(40, 60)] for each in (tasks, other)]
    assert places[0] != places[1]


class Recorder(Curriculum):
    """Takes the usual task, and notes what it is asked and told."""

    def __init__(self) -> None:
        self.draws: list[Draw] = []
        self.outcomes: dict[int, list[TaskOutcome]] = {}  # the outcomes known at a position
        self.seen: list[TaskOutcome] = []

    def choose(self, draw: Draw) -> Choice:
        self.draws.append(draw)
        self.outcomes[draw.position] = list(self.seen)
        return Choice(draw.usual)

    def observe(self, outcome: TaskOutcome) -> None:
        self.seen.append(outcome)


def recorded(slots: int, size: int = 7) -> tuple[Recorder, CurriculumChooser]:
    recorder, interleaving = Recorder(), Interleaving(sizes=(size,), weights=(None,), seed=3)
    return recorder, CurriculumChooser("own", [recorder], interleaving, seed=3, slots=slots, groups_per_step=2)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=40, max_size=40), st.integers(2, 8))
def test_a_position_sees_the_outcomes_of_all_positions_a_streams_slots_before_it(waits: list[int], slots: int) -> None:
    recorder, tasks = recorded(slots)
    play(tasks, lambda index: waits[index], slots=slots, groups=2, positions=40)
    for draw in recorder.draws:
        assert [each.position for each in recorder.outcomes[draw.position]] == list(range(draw.position - slots + 1))
        assert draw.step == draw.position // 2
    seen = [(each.position, each.task, list(each.scores)) for each in recorder.seen]
    assert seen == [
        (each, tasks_of[1], result(each, tasks_of)) for each, _, _ in seen for tasks_of in [(0, recorder.draws[each].usual)]
    ]


@pytest.mark.parametrize(
    "order", [Windowed(window=4, groups_per_step=3, max_staleness=1), DropTooOld()], ids=["windowed", "drop_too_old"]
)
def test_in_other_orders_late_outcomes_are_seen_once_all_the_same(order: GroupOrder) -> None:
    recorder, tasks = recorded(6)
    waits = Random(2)
    play(tasks, lambda index: waits.choice([0, 0, 0, 40]), order=order, positions=60)
    seen = [each.position for each in recorder.seen]
    assert len(seen) == len(set(seen)) and set(range(60 - KEPT * 6)) <= set(seen)
    for position, outcomes in recorder.outcomes.items():
        assert all(each.position <= position - 6 for each in outcomes)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 59), st.lists(st.integers(0, 12), min_size=60, max_size=60))
def test_a_state_at_any_position_continues_with_the_same_tasks(cut: int, waits: list[int]) -> None:
    """Synchronous: nothing is in flight when a state is saved."""
    wanted, _ = play(chooser(3), lambda index: 0, slots=3, refill=False)
    first = chooser(3)
    _, stream = play(first, lambda index: waits[index], slots=3, refill=False, positions=cut)
    state = json.loads(json.dumps(first.state()))
    second = chooser(3)
    second.load_state(state)
    assert second.state() == state
    found, _ = play(second, lambda index: waits[-index], slots=3, refill=False, state=stream)
    assert found == {position: place for position, place in wanted.items() if position >= cut}


def test_unfinished_groups_begin_again_with_their_tasks_and_known_outcomes_stay() -> None:
    tasks = chooser()
    places = {position: tasks.locate(position) for position in range(6)}
    for position in (1, 4):
        tasks.record(position, [0.0, 1.0])
    again = chooser()
    again.load_state(json.loads(json.dumps(tasks.state())))
    assert {position: again.locate(position) for position in (0, 2, 3, 5, 1, 4)} == places
    for each in (tasks, again):
        for position in (0, 2, 3, 5):
            each.record(position, [1.0, 1.0])
    assert [again.locate(position) for position in range(6, 12)] == [tasks.locate(position) for position in range(6, 12)]
    assert again.state() == tasks.state()


def test_the_outcome_of_a_group_that_began_again_counts_once() -> None:
    recorder, tasks = recorded(2)
    for position in range(6):
        tasks.locate(position)
        tasks.record(position, [1.0])
    tasks.record(0, [0.0])
    tasks.locate(6)
    assert [each.position for each in recorder.seen] == [0, 1, 2, 3, 4]


def test_an_outcome_that_never_comes_counts_as_a_failure_in_the_end() -> None:
    recorder, tasks = recorded(2)
    for position in range(KEPT * 2 + 2):
        tasks.locate(position)
        if position != 1:
            tasks.record(position, [1.0])
    assert [each.scores for each in recorder.seen if each.position == 1] == [()]
    assert tasks.find(1) is None and len(tasks.state()["placed"]) <= KEPT * 2


def test_a_run_without_a_state_begins_at_its_position() -> None:
    recorder, tasks = recorded(4)
    tasks.locate(1000)
    tasks.locate(1002)
    assert [draw.position for draw in recorder.draws] == [1000, 1001, 1002]


def test_the_last_epoch_ends() -> None:
    tasks = chooser(epochs=2)
    tasks.locate(27)
    with pytest.raises(IndexError, match="2 epochs of 14 tasks"):
        tasks.locate(28)


def test_states_of_other_data_are_refused_and_of_another_curriculum_left_out(caplog: pytest.LogCaptureFixture) -> None:
    state = chooser().state()
    with pytest.raises(DataError, match=r"entries of \[9, 5\] tasks, and data\.train has \[9, 6\]"):
        chooser(sizes=(9, 6)).load_state(state)
    _, other = recorded(6)
    with caplog.at_level(logging.WARNING):
        other.load_state(state)
    assert "data.curriculum.name is own, and the checkpoint has the state of success_rate" in caplog.text
    assert other.state()["next"] is None


@pytest.mark.parametrize("chosen", [Choice(7), Choice(-1), Choice("2"), 3, None])  # type: ignore[arg-type]
def test_a_curriculum_that_chooses_no_task_is_an_error(chosen: Any) -> None:
    recorder, tasks = recorded(2)
    recorder.choose = lambda draw: chosen  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"the curriculum own chose .*; return Choice\(task\) with a task from 0 to 6"):
        tasks.locate(0)
