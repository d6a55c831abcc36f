"""Tasks by the policy's success on them: what is drawn how often, what is forgotten, and that a state continues exactly."""

from __future__ import annotations

import json
from collections import Counter
from copy import deepcopy
from itertools import pairwise
from math import exp, lgamma, log
from random import Random

import pytest

from strop.extensions.curriculum.base import Choice, Draw, TaskOutcome
from strop.extensions.curriculum.curricula import SuccessRateCurriculum
from strop.extensions.curriculum.curriculum_keys_config import SuccessRateConfig


def draw(seed: int, *, in_flight: frozenset[int] = frozenset()) -> Draw:
    return Draw(position=seed, step=0, usual=0, in_flight=in_flight, random=Random(seed))


def outcome(task: int, *scores: float) -> TaskOutcome:
    return TaskOutcome(task=task, position=0, step=0, scores=scores)


def made(results: list[tuple[int, int] | None], **options: float) -> SuccessRateCurriculum:
    """A curriculum that has seen these successes among so many rollouts; None: a task never seen."""
    curriculum = SuccessRateCurriculum(len(results), SuccessRateConfig(**options))
    for task, result in enumerate(results):
        if result is not None:
            curriculum.observe(outcome(task, *[1.0] * result[0], *[0.0] * (result[1] - result[0])))
    return curriculum


def frequencies(curriculum: SuccessRateCurriculum, draws: int = 500, **options: frozenset[int]) -> dict[int, float]:
    """How often each task is drawn with what is known now."""
    chosen = [deepcopy(curriculum).choose(draw(seed, **options)).task for seed in range(draws)]
    counts = Counter(chosen)
    return {task: count / draws for task, count in counts.items()}


def signal(successes: float, failures: float, rollouts: int) -> float:
    """Probability that a group has a signal, by the Beta function."""

    def log_beta(a: float, b: float) -> float:
        return lgamma(a) + lgamma(b) - lgamma(a + b)

    a, b = 0.5 + successes, 0.5 + failures
    return 1 - exp(log_beta(a + rollouts, b) - log_beta(a, b)) - exp(log_beta(a, b + rollouts) - log_beta(a, b))


def choose_often(curriculum: SuccessRateCurriculum, times: int) -> Choice:
    return [curriculum.choose(draw(seed)) for seed in range(times)][-1]


def test_tasks_are_drawn_by_the_square_of_the_probability_that_a_group_has_a_signal() -> None:
    results = [(0, 8), (1, 8), (4, 8), (7, 8), (8, 8)]
    weights = [signal(right, of - right, 8) ** 2 for right, of in results]
    assert frequencies(made(results)) == pytest.approx(
        {task: weight / sum(weights) for task, weight in enumerate(weights)}, abs=0.07
    )


def test_a_group_without_a_success_does_not_make_a_task_impossible() -> None:
    few, many = frequencies(made([(0, 4), (2, 4)])), frequencies(made([(0, 64), (2, 4)]))
    assert few[0] > 0.08 and many.get(0, 0) < 0.02


def test_among_tasks_that_were_never_solved_the_one_that_was_tried_least_is_drawn_most() -> None:
    drawn = frequencies(made([(0, 8), (0, 16), (0, 64)]))
    assert drawn[0] > drawn[1] > drawn[2] > 0


def test_one_success_brings_a_hard_task_to_the_front() -> None:
    drawn = frequencies(made([(0, 16)] * 9 + [(1, 16)]))
    assert drawn[9] > 3 * max(drawn[task] for task in range(9))


def test_tasks_never_seen_have_their_due_by_what_the_others_were_worth() -> None:
    useful = frequencies(made([(8, 16), (8, 16), None, None]))
    assert useful == pytest.approx(dict.fromkeys(range(4), 0.25), abs=0.07)
    results = [(8, 16), (0, 16), (0, 16), (16, 16), None, None]
    values = [signal(right, 16 - right, 16) for right, _ in filter(None, results)]
    new, known = sum(values) / 4, sum(value**3 for value in values) / sum(value**2 for value in values)
    dull = frequencies(made(results))
    assert dull[4] + dull[5] == pytest.approx(new / (new + known), abs=0.07)
    assert new / (new + known) < 0.4


def test_without_a_result_every_task_is_as_likely() -> None:
    assert frequencies(made([None] * 4)) == pytest.approx(dict.fromkeys(range(4), 0.25), abs=0.07)


def test_each_new_result_takes_from_the_weight_of_earlier_ones() -> None:
    curriculum = made([(0, 16)], decay=0.5)
    curriculum.observe(outcome(0, *[1.0] * 16))
    assert curriculum.choose(draw(0)).metrics["success_rate"] == (0.5 + 16) / (1 + 16 + 8)


@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_results_fade_by_decay_in_each_epoch_of_draws_until_the_task_is_tried_again(decay: float) -> None:
    curriculum = made([(0, 64), (4, 8)], decay=decay)
    before = frequencies(curriculum).get(0, 0)
    for _ in range(8):  # as many epochs; task 1 has a result in each
        choose_often(curriculum, 2)
        curriculum.observe(outcome(1, *[1.0] * 4, *[0.0] * 4))
    state = curriculum.state()
    assert state["draws"] == 16 and state["seen"][0] == [0, 0.0, 64.0, 0]  # as they were at the result
    after = frequencies(curriculum).get(0, 0)
    assert before < 0.02 and (after > 0.2 if decay < 1 else after < 0.02)


def test_a_task_that_failed_with_an_error_is_left_alone_for_an_epoch_of_draws() -> None:
    curriculum = made([(8, 16), (8, 16), None])
    curriculum.observe(outcome(0))
    curriculum.observe(outcome(2))
    assert set(frequencies(curriculum, 200)) == {1}
    choose_often(curriculum, 3)
    assert set(frequencies(curriculum, 200)) == {0, 1, 2}


@pytest.mark.parametrize("repeats", [1, 2, 4])
def test_a_task_comes_at_most_so_often_in_an_epoch_of_draws_evenly_spaced(repeats: int) -> None:
    curriculum = made([(4, 8), (4, 8)] + [(0, 64)] * 14, repeats=repeats)
    chosen = [curriculum.choose(draw(seed)).task for seed in range(64)]
    places = [place for place, task in enumerate(chosen) if task == 0]
    assert min(after - before for before, after in pairwise(places)) >= 16 // repeats
    assert len(places) > 0.7 * 4 * repeats


def test_when_every_task_failed_they_come_as_without_a_curriculum() -> None:
    curriculum = made([None, None])
    for task in (0, 1):
        curriculum.observe(outcome(task))
    assert set(frequencies(curriculum, 50)) == {0}  # the usual one


def test_tasks_in_flight_are_not_drawn_unless_nothing_else_is_left() -> None:
    curriculum = made([(8, 16), (8, 16), None])
    assert set(frequencies(curriculum, 200, in_flight=frozenset({0, 2}))) == {1}
    assert curriculum.choose(draw(1, in_flight=frozenset({0, 1, 2}))).task == 0  # the usual one


def test_scores_are_successes_from_a_threshold_on_or_cut_to_their_range() -> None:
    by_threshold, cut = made([None], threshold=2.0), made([None])
    for curriculum in (by_threshold, cut):
        curriculum.observe(outcome(0, 2.0, 1.9, -3.0, 0.5))
    assert by_threshold.choose(draw(0)).metrics["success_rate"] == (0.5 + 1) / 5
    assert cut.choose(draw(0)).metrics["success_rate"] == (0.5 + 1 + 1 + 0 + 0.5) / 5


def test_metrics_say_what_is_known_of_the_tasks_and_of_the_chosen_one() -> None:
    choice = made([(16, 16), (0, 16), (8, 16), None, None]).choose(draw(0, in_flight=frozenset({0, 1, 3, 4})))
    wanted = {
        "never_seen": 0.4,
        "solved": 0.2,
        "impossible": 0.2,
        "success_rate": 0.5,
        "signal": signal(8, 8, 16),
        "entropy": 0.0,
    }
    assert choice.task == 2 and choice.metrics == pytest.approx(wanted)
    unknown = made([None] * 8).choose(draw(0)).metrics
    assert unknown == pytest.approx({"never_seen": 1.0, "solved": 0.0, "impossible": 0.0, "entropy": log(8)})


def test_the_entropy_is_of_the_draw() -> None:
    assert made([(4, 8)] * 3).choose(draw(0)).metrics["entropy"] == pytest.approx(log(3))
    assert made([(4, 8), (4, 8), None]).choose(draw(0)).metrics["entropy"] == pytest.approx(
        -(0.5 * log(0.5) + 2 * 0.25 * log(0.25))
    )


def test_a_group_of_one_rollout_has_values_all_the_same() -> None:
    assert set(frequencies(made([(1, 1), (0, 1)]), 200)) == {0, 1}


def test_a_state_continues_exactly() -> None:
    curriculum = made([(8, 8), (0, 8), (3, 8), None, (5, 8), None, None])
    curriculum.observe(outcome(5))
    curriculum.observe(outcome(0))
    choose_often(curriculum, 5)
    again = SuccessRateCurriculum(7, SuccessRateConfig())
    again.load_state(json.loads(json.dumps(curriculum.state())))
    for seed in range(200):
        assert again.choose(draw(seed)) == curriculum.choose(draw(seed))
        if seed % 3 == 0:
            for each in (again, curriculum):
                each.observe(outcome(seed % 7, *[1.0] * (seed % 4), 0.0))
    assert again.state() == curriculum.state()
