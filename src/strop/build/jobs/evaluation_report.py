"""What an evaluation found, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.statistics.intervals import standard_error
from strop.statistics.task_results import TaskResult, pass_at_k

SAMPLES_SHOWN, TEXT_SHOWN = 3, 160
TRUNCATED = ("length", "context")


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """Metrics by name, their standard errors, and every task with its samples as stored."""

    metrics: Mapping[str, float]
    standard_errors: Mapping[str, float] = field(default_factory=dict)
    tasks: Sequence[Mapping[str, Any]] = ()
    examples: int | None = None  # of recorded data
    headline: str | None = None  # name of the metric that eval.metric chose
    stored: Path | None = None  # the file with every sample
    model: str = ""
    step: int | None = None

    def to_json(self) -> str:
        content = {
            "model": self.model,
            "step": self.step,
            "metrics": dict(self.metrics),
            "standard_errors": dict(self.standard_errors),
            **({"examples": self.examples} if self.examples is not None else {"tasks": len(self.tasks)}),
            "stored_in": None if self.stored is None else str(self.stored),
        }
        return json.dumps(content, indent=1)

    def format(self) -> str:
        """Return the report for people: metrics with standard errors, some samples, and where the others are."""
        names = [name for name in self.metrics if name != "seconds"]
        width = max(map(len, names), default=0) + 2
        lines = [f"{name:{width}}{self._format_value(name)}" for name in names]
        if self.tasks:
            count = len(self.tasks[0]["samples"])
            lines.append(
                f"{'n':{width}}{_count(len(self.tasks), 'task')}, {_count(count, 'sample')} each; ± is one standard error over tasks"
            )
        lines += ["", *(_format_sample(task) for task in self.tasks[:SAMPLES_SHOWN])] if self.tasks else []
        if self.headline is not None:
            lines += ["", f"{self.headline} = {self.metrics[self.headline]:.4f}"]
        if self.stored is not None:
            lines.append(f"every sample is in {self.stored}")
        elif self.tasks:
            lines.append("the samples are not stored; eval.save_path=FOLDER stores them")
        return "\n".join(lines)

    def _format_value(self, name: str) -> str:
        value = self.metrics[name]
        if name.endswith("errors") or name.startswith("examples"):
            return f"{value:.0f}"
        error = self.standard_errors.get(name)
        return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def compute_standard_errors(tasks: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, float]:
    """Return the standard error of each metric that is a mean over tasks, by name; none for a single task.

    Samples of one task are not independent, so a task counts once, with its mean: the standard error is clustered by task.
    """
    errors: dict[str, float] = {}
    environments = {task["environment"] for task in tasks}
    for name in names:
        environment, slash, metric = name.rpartition("/")
        chosen = [task for task in tasks if not slash or task["environment"] == environment]
        measure = _find_measure(metric) if not slash or environment in environments else None
        if measure is not None and len(chosen) > 1:
            errors[name] = standard_error([measure(task) for task in chosen])
    return errors


def _find_measure(metric: str) -> Callable[[Mapping[str, Any]], float] | None:
    """Return the function from a task to its part of a metric; None for a metric that is no mean over tasks."""
    name, _, k = metric.partition("@")
    match name:
        case "accuracy" | "avg":
            return lambda task: _mean(sample["accuracy"] for sample in task["samples"])
        case "pass":
            return lambda task: pass_at_k(len(task["samples"]), _result(task).correct, int(k))
        case "cons":
            return lambda task: _result(task).consensus(int(k))
        case "reward":
            return lambda task: _mean(sample["reward"] for sample in task["samples"])
        case "avg_length":
            return lambda task: _mean(sample["tokens"] for sample in task["samples"])
        case "truncated":
            return lambda task: _mean(sample["ending"] in TRUNCATED for sample in task["samples"])
        case _:
            return None


def _result(task: Mapping[str, Any]) -> TaskResult:
    samples = task["samples"]
    return TaskResult(
        task["environment"], tuple(sample["accuracy"] for sample in samples), tuple(sample["answer"] for sample in samples)
    )


def _mean(values: Any) -> float:
    listed = [float(value) for value in values]
    return sum(listed) / len(listed)


def _format_sample(task: Mapping[str, Any]) -> str:
    sample = task["samples"][0]
    asked = [message["content"] for message in sample["messages"] if message["role"] == "user"]
    question = asked[0] if asked else task["task"]
    outcome = f"error: {sample['error']}" if sample["error"] is not None else f"reward {sample['reward']:g}"
    expected = "" if task["answer"] is None else f", expected {_shorten(str(task['answer']))}"
    return f"{_shorten(question)} -> {_shorten(sample['completion'])} ({outcome}{expected})"


def _shorten(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= TEXT_SHOWN else f"{shown[: TEXT_SHOWN // 2]} ... {shown[-TEXT_SHOWN // 2 :]}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
