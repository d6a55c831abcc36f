"""Tasks by the policy's success on them: what is drawn how often, what rests, and that a state continues exactly."""

from __future__ import annotations

import json
import math
from collections import Counter
from random import Random

import pytest

from strop.data.curriculum.base import Draw, TaskOutcome
from strop.data.curriculum.curriculum_config import SuccessRateConfig
from strop.data.curriculum.success_rate_curriculum import SuccessRateCurriculum


def draw(seed: int, *, step: int = 0, in_flight: frozenset[int] = frozenset()) -> Draw:
    return Draw(position=seed, step=step, usual=0, in_flight=in_flight, random=Random(seed))


def outcome(task: int, *scores: float, step: int = 0) -> TaskOutcome:
    return TaskOutcome(task=task, position=0, step=step, scores=scores)


def made(rates: list[float | None], **options: float) -> SuccessRateCurriculum:
    """A curriculum that has seen these success rates; None: a task never seen."""
    curriculum = SuccessRateCurriculum(len(rates), SuccessRateConfig(**options))  # type: ignore[arg-type]
    for task, rate in enumerate(rates):
        if rate is not None:
            curriculum.observe(outcome(task, rate))
    return curriculum


def frequencies(curriculum: SuccessRateCurriculum, draws: int = 4000, **options: object) -> dict[int, float]:
    counts = Counter(curriculum.choose(draw(seed, **options)).task for seed in range(draws))  # type: ignore[arg-type]
    return {task: count / draws for task, count in counts.items()}


def test_tasks_are_drawn_by_their_distance_from_the_target() -> None:
    drawn = frequencies(made([0.5, 0.25, 0.75, 0.9], target=0.5, width=0.25))
    weights = [1.0, math.exp(-0.5), math.exp(-0.5), math.exp(-(1.6**2) / 2)]
    assert drawn == pytest.approx({task: weight / sum(weights) for task, weight in enumerate(weights)}, abs=0.03)


def test_a_share_of_the_draws_goes_to_tasks_never_seen() -> None:
    drawn = frequencies(made([0.5, 0.5, None, None, None], exploration=0.3))
    assert drawn == pytest.approx({0: 0.35, 1: 0.35, 2: 0.1, 3: 0.1, 4: 0.1}, abs=0.03)


def test_without_a_result_every_task_is_as_likely() -> None:
    assert frequencies(made([None] * 4)) == pytest.approx(dict.fromkeys(range(4), 0.25), abs=0.03)


def test_solved_and_impossible_tasks_rest_and_are_tried_again() -> None:
    curriculum = made([1.0, 0.0, 0.5, 0.95, 0.05], rest=7, exploration=0.5)
    assert set(frequencies(curriculum, 500, step=6)) == {2}
    drawn = frequencies(curriculum, step=7)
    assert drawn == pytest.approx({2: 0.5, 0: 0.125, 1: 0.125, 3: 0.125, 4: 0.125}, abs=0.03)


def test_a_task_rests_twice_as_long_each_time_in_a_row() -> None:
    curriculum, step = made([None, 0.5], rest=3, smoothing=1.0), 0
    for rest in (3, 6, 12, 24, 48, 48):
        curriculum.observe(outcome(0, 0.0, step=step))
        assert set(frequencies(curriculum, 100, step=step + rest - 1)) == {1}
        assert 0 in frequencies(curriculum, 100, step=step + rest)
        step += rest
    curriculum.observe(outcome(0, 0.5, step=step))
    curriculum.observe(outcome(0, 1.0, step=step))
    assert 0 in frequencies(curriculum, 100, step=step + 3)


def test_a_task_that_failed_rests_and_keeps_its_rate() -> None:
    curriculum = made([0.5, 0.5], rest=5)
    curriculum.observe(outcome(0, step=3))
    assert set(frequencies(curriculum, 200, step=7)) == {1}
    assert frequencies(curriculum, step=8) == pytest.approx({0: 0.5, 1: 0.5}, abs=0.03)


def test_when_all_tasks_rest_they_are_drawn_all_the_same() -> None:
    assert set(frequencies(made([1.0, 0.0, 1.0]), 200)) == {0, 1, 2}


def test_tasks_in_flight_are_not_drawn_unless_nothing_else_is_left() -> None:
    curriculum = made([0.5, 0.5, None])
    assert set(frequencies(curriculum, 200, in_flight=frozenset({0, 2}))) == {1}
    assert curriculum.choose(draw(1, in_flight=frozenset({0, 1, 2}))).task == 0  # the usual one


def test_a_rate_is_a_moving_average_that_begins_with_the_first_result() -> None:
    curriculum = made([None], smoothing=0.25)
    for scores, rate in (((1.0, 0.0, 0.0, 1.0), 0.5), ((1.0, 1.0), 0.625), ((0.0,), 0.46875)):
        curriculum.observe(outcome(0, *scores))
        assert curriculum.choose(draw(0)).metrics["success_rate"] == rate


def test_scores_are_successes_from_a_threshold_on_or_cut_to_their_range() -> None:
    by_threshold, cut = made([None], threshold=2.0), made([None])
    for curriculum in (by_threshold, cut):
        curriculum.observe(outcome(0, 2.0, 1.9, -3.0, 0.5))
    assert by_threshold.choose(draw(0)).metrics["success_rate"] == 0.25
    assert cut.choose(draw(0)).metrics["success_rate"] == (1 + 1 + 0 + 0.5) / 4


def test_metrics_say_what_is_known_of_the_tasks_and_how_spread_the_draw_is() -> None:
    metrics = made([1.0, 0.0, 0.5, None, None], exploration=0.5).choose(draw(0)).metrics
    wanted = {"never_seen": 0.4, "solved": 0.2, "impossible": 0.2}
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)
    assert metrics["entropy"] == pytest.approx(-(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25)))
    assert made([0.5] * 3).choose(draw(0)).metrics["entropy"] == pytest.approx(math.log(3))
    assert made([None] * 8).choose(draw(0)).metrics["entropy"] == pytest.approx(math.log(8))


def test_a_state_continues_exactly() -> None:
    curriculum = made([1.0, 0.0, 1 / 3, None, 0.7, None])
    curriculum.observe(outcome(5))
    again = SuccessRateCurriculum(6, SuccessRateConfig())
    again.load_state(json.loads(json.dumps(curriculum.state())))
    for seed in range(200):
        assert again.choose(draw(seed, step=19)) == curriculum.choose(draw(seed, step=19))
    assert again.state() == curriculum.state()


def test_a_narrow_width_still_draws_the_nearest() -> None:
    assert set(frequencies(made([0.1, 0.2, 0.3], width=1e-4), 100)) == {2}
