"""Evaluations that are compared: their scale, repeated tasks, sets and directions."""

from __future__ import annotations

from typing import Any

import pytest

import strop
from strop.extensions.comparison.evaluation_comparison import compare_evaluations
from strop.extensions.evaluation.statistics import NotComparable


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


def test_scores_of_another_scale_are_no_shares() -> None:
    a = [make_task([float(index)], task=str(index)) for index in range(10)]
    b = [make_task([float(index) + 3], task=str(index)) for index in range(10)]
    found = compare_evaluations(a, b)
    assert found.verdict.startswith("B is better: +3, 95 % interval +") and "points" not in found.verdict


def test_repeated_tasks_are_clusters() -> None:
    """Eight copies of three problems are three problems, and the mean is over all rows, as an evaluation has it."""
    a = [make_task([0.0], task=str(index % 3)) for index in range(24)]
    b = [make_task([1.0], task=str(index % 3)) for index in range(24)]
    found = compare_evaluations(a, b)
    assert found.total.tasks == 24 and found.total.p_value == 0.25 and found.better is None


def test_sets_of_one_name_in_one_file_only_do_not_matter() -> None:
    a, b = [make_task([1.0], set="gsm8k")], [make_task([1.0])]
    assert compare_evaluations(a, b).total.tasks == 1
    with pytest.raises(NotComparable, match="no task is in both"):
        compare_evaluations(a, [make_task([1.0], set="math500")])


def test_fewer_truncated_answers_are_better() -> None:
    a = [make_task([1.0], task=str(index)) for index in range(20)]
    b = [make_task([1.0], task=str(index)) for index in range(20)]
    for task in b:
        task["samples"][0]["ending"] = "stop"
    found = compare_evaluations(a, b, metric="truncated")
    assert found.better == "b" and found.verdict.startswith("B is better in truncated: -100.0 points") and len(found.won) == 3


def test_evaluations_are_compared_in_memory() -> None:
    def make(right: int) -> strop.Evaluation:
        tasks = [make_task([float(index < right)], task=str(index)) for index in range(20)]
        return strop.Evaluation({}, [], tasks=tasks)

    found = strop.compare(make(5), make(15))
    assert found.better == "b" and found.total.difference == 0.5 and found.verdict.startswith("B is better: +50.0 points")
