"""Metrics of stored tasks, and how much they vary with the samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strop.extensions.evaluation.statistics import NotComparable, find_task_metric, list_task_metrics


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
