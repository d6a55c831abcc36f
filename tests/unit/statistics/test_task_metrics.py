"""Metrics of stored tasks, and how much they vary with the samples."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.statistics import NotComparable, TaskResult, find_task_metric, list_task_metrics, summarize_results


def make_task(accuracies: list[float], **changes: Any) -> dict[str, Any]:
    samples = [
        {
            "accuracy": value,
            "answer": str(value),
            "reward": value,
            "tokens": 10,
            "ending": "length",
            "error": None,
            "completion": "x",
        }
        for value in accuracies
    ]
    return {"task": "t", "environment": "math", "answer": "1", "samples": samples} | changes


def test_values_are_those_of_an_evaluation() -> None:
    task = make_task([1.0, 0.0, 0.0, 1.0])
    found = {name: find_task_metric(name).value(task) for name in [*list_task_metrics([task]), "avg@4", "maj@1"]}
    assert found == {
        "accuracy": 0.5, "avg@4": 0.5, "pass@2": pytest.approx(5 / 6), "pass@4": 1.0, "cons@4": 1.0, "reward": 0.5, "avg_length": 10.0,
        "truncated": 1.0, "errors": 0.0, "maj@1": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["accuracy", "pass@1", "pass@2"])
def test_the_noise_is_the_variance_over_other_samples(name: str) -> None:
    """Estimated without bias for means, and closely for pass@2."""
    metric, random = find_task_metric(name), np.random.default_rng(0)
    tasks = [make_task(random.binomial(1, 0.4, 8).astype(float).tolist()) for _ in range(4000)]
    noise = [each for task in tasks if (each := metric.noise(task)) is not None]
    assert np.mean(noise) == pytest.approx(np.var([metric.value(task) for task in tasks]), rel=0.12)


def test_one_sample_and_as_many_as_k_tell_nothing_of_the_noise() -> None:
    assert find_task_metric("accuracy").noise(make_task([1.0])) is None
    assert find_task_metric("pass@2").noise(make_task([1.0, 0.0])) is None


@pytest.mark.parametrize("name", ["acc", "pass@", "pass@0", "pass@x", "seconds", "score", "avg@x"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(NotComparable, match="choose accuracy"):
        find_task_metric(name)


@pytest.mark.parametrize("name", ["pass@4", "cons@4", "maj@4", "avg@4"])
def test_metrics_that_the_samples_do_not_give_are_refused(name: str) -> None:
    with pytest.raises(NotComparable, match="2"):
        find_task_metric(name).value(make_task([1.0, 0.0]))


# --- maj@k: the vote of any k samples, in expectation -------------------------------------------------------------------------


def vote_of_every_choice(result: TaskResult, k: int) -> float:
    """Count every choice of k samples, ties shared."""
    outcomes = []
    for chosen in itertools.combinations(range(len(result.answers)), k):
        votes = Counter(answer for place in chosen if (answer := result.answers[place]) is not None)
        best = [answer for answer in votes if votes[answer] == max(votes.values())]
        means = [
            [accuracy for accuracy, given in zip(result.accuracies, result.answers, strict=True) if given == answer]
            for answer in best
        ]
        outcomes.append(sum(sum(each) / len(each) for each in means) / len(best) if best else 0.0)
    return sum(outcomes) / len(outcomes)


samples = st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8)


@given(samples, st.data())
def test_maj_at_k_is_the_mean_over_all_choices_of_k_samples(answers: list[str | None], data: st.DataObject) -> None:
    accuracies = tuple(float(answer == "a") + 0.5 * (answer == "b") for answer in answers)
    result, k = TaskResult("e", accuracies, tuple(answers)), data.draw(st.integers(1, len(answers)))
    assert result.majority(k) == pytest.approx(vote_of_every_choice(result, k), abs=1e-12)


def test_of_all_samples_cons_is_the_earliest_of_equally_frequent_answers_and_maj_any_of_them() -> None:
    result = TaskResult("e", (1.0, 0.0), ("1", "2"))
    assert (result.consensus(), result.majority(2)) == (1.0, 0.5)
    found = summarize_results([result], (), (2,), (1, 2))
    assert (found["cons@2"], found["maj@1"], found["maj@2"]) == (1.0, 0.5, 0.5)
    assert not any(name.startswith("maj") for name in summarize_results([TaskResult("e", (1.0,), (None,))], (), (1,), (1,)))


@pytest.mark.parametrize("k", [0, 3])
def test_maj_at_k_needs_as_many_samples(k: int) -> None:
    with pytest.raises(ValueError, match=f"maj@{k} cannot be estimated from 2 samples"):
        TaskResult("e", (1.0, 0.0), ("1", "2")).majority(k)


def test_the_vote_of_many_samples_is_counted_in_no_time() -> None:
    answers = tuple(str(place % 11) for place in range(128))
    started = time.perf_counter()
    TaskResult("e", tuple(float(answer == "3") for answer in answers), answers).majority(64)
    assert time.perf_counter() - started < 1
