"""The results of an evaluation, for people and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from strop.checkpointing.saved_model import SavedModel
from strop.extensions.evaluation.statistics import Interval, confidence_interval, standard_error
from strop.safety.printable import make_printable
from strop.statistics import pass_at_k, present_tasks
from strop.trainer.evaluation import TRUNCATED, read_result

SAMPLES_SHOWN, TEXT_SHOWN, ERROR_SHOWN = 3, 160, 400
SHARES = ("accuracy", "avg", "pass", "cons", "maj", "truncated")  # metrics that usually lie between 0 and 1
SUMS = ("errors", "missing", "seconds")
NORMAL_95 = 1.959963984540054


@dataclass(frozen=True)
class SetResult:
    """The results on one set of tasks."""

    name: str
    metrics: Mapping[str, float]
    tasks: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """Metrics by name, their uncertainty, and every task with its samples as stored."""

    metrics: Mapping[str, float]
    standard_errors: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, Interval] = field(default_factory=dict)  # of 95 %
    tasks: Sequence[Mapping[str, Any]] = ()
    sets: Mapping[str, int] = field(default_factory=dict)  # tasks by set
    categories: Mapping[str, Mapping[str, CategoryResult]] = field(default_factory=dict)  # by set, for tasks that have one
    examples: int | None = None  # of recorded data
    headline: str | None = None  # name of the metric chosen by eval.metric
    stored: Path | None = None  # the file with every sample
    model: str = ""
    identity: Mapping[str, Any] | None = None  # settings that affect the samples, as stored with them
    step: int | None = None

    @property
    def failures(self) -> list[str]:
        """Reasons why samples failed: errors of environments, prompts that are too long."""
        return [str(sample["error"]) for task in self.tasks for sample in task["samples"] if sample["error"] is not None]

    def describe_failures(self) -> str:
        """Describe how many samples failed, and why the first one did; empty if none failed."""
        if not (failures := self.failures):
            return ""
        samples = _count(self._count_samples(), "sample")
        left_out = f", {self.missing} by no fault of the policy, which the scores leave out" if self.missing else ""
        return f"{len(failures)} of {samples} failed{left_out}; the first: {_one_line(failures[0])}"

    @property
    def missing(self) -> int:
        """The number of samples that failed by no fault of the policy. The scores are those of the others."""
        return sum(sample["accuracy"] is None for task in self.tasks for sample in task["samples"])

    @property
    def says_nothing(self) -> bool:
        """Whether every sample failed, so that no metric describes the model."""
        return bool(self.tasks) and len(self.failures) == self._count_samples()

    def _count_samples(self) -> int:
        return sum(len(task["samples"]) for task in self.tasks)

    def to_json(self) -> str:
        content = {
            "model": self.model,
            "step": self.step,
            "metrics": dict(self.metrics),
            "standard_errors": dict(self.standard_errors),
            "confidence_intervals": {name: [interval.low, interval.high] for name, interval in self.intervals.items()},
            **({"examples": self.examples} if self.examples is not None else {"tasks": len(self.tasks), "sets": dict(self.sets)}),
            "categories": {
                name: {key: {"accuracy": each.accuracy, "tasks": each.tasks} for key, each in found.items()}
                for name, found in self.categories.items()
            },
            "stored_in": None if self.stored is None else str(self.stored),
        }
        return json.dumps(content, indent=1)

    def format(self) -> str:
        """Return the report for people: metrics with their uncertainty, some samples, and the location of the others."""
        names = [name for name in self.metrics if not name.endswith("seconds")]
        width = max(map(len, names), default=0) + 2
        lines = [f"{name:{width}}{self._format_value(name)}" for name in names]
        if self.tasks:
            each = {len(task["samples"]) for task in self.tasks}
            samples = f"{_count(min(each), 'sample')} each" if len(each) == 1 else f"{min(each)} to {max(each)} samples each"
            of_sets = f" ({', '.join(f'{name}: {count:,}' for name, count in self.sets.items())})" if len(self.sets) > 1 else ""
            lines.append(
                f"{'n':{width}}{_count(len(self.tasks), 'task')}{of_sets}, {samples}; ± is one standard error over tasks"
            )
            lines.append(f"{'':{width}}and [] a 95 % confidence interval")
        for name, found in self.categories.items():
            lines += ["", f"accuracy of {name} by category", *_format_categories(found)]
        lines += ["", *(_format_sample(task) for task in self.tasks[:SAMPLES_SHOWN])] if self.tasks else []
        if self.headline is not None:
            lines += ["", *self._format_headline(self.headline)]
        if self.stored is not None:
            lines.append(f"every sample is in {self.stored}")
        elif self.tasks:
            lines.append("the samples are not stored; eval.save_path=FOLDER stores them")
        return "\n".join(lines)

    def _format_headline(self, headline: str) -> list[str]:
        several = [name for name in self.sets if len(self.sets) > 1 and f"{name}/{headline}" in self.metrics]
        of_sets = [f"{name}: {headline} = {self.metrics[f'{name}/{headline}']:.4f}" for name in several]
        return [*of_sets, f"{headline} = {self.metrics[headline]:.4f}"]

    def _format_value(self, name: str) -> str:
        value = self.metrics[name]
        if name.endswith(("errors", "missing")) or name.startswith("examples"):
            return f"{value:.0f}"
        error, interval = self.standard_errors.get(name), self.intervals.get(name)
        text = f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
        return text if interval is None else f"{text}  [{interval.low:.4f}, {interval.high:.4f}]"


@dataclass(frozen=True)
class CategoryResult:
    """The accuracy on the tasks of one category."""

    accuracy: float
    tasks: int


def _one_line(text: str) -> str:
    return make_printable(" ".join(text.split()))[:ERROR_SHOWN]


def make_report(results: Sequence[SetResult], *, model: SavedModel, folder: Path | None) -> EvaluationReport:
    """Combine the results of all sets: several sets keep separate metrics, plus plain means over the sets."""
    reports = {each.name: _report_set(each) for each in results}
    whole = next(iter(reports.values())) if len(reports) == 1 else _join(reports)
    return replace(
        whole,
        tasks=[task for each in results for task in each.tasks],
        sets={each.name: len(each.tasks) for each in results},
        categories={each.name: found for each in results if (found := _find_categories(each.tasks))},
        stored=None if folder is None else folder / f"step_{model.step or 0:06d}.json",
        model=model.weights,
        step=model.step,
    )


def strip_prefix(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix("validation/"): value for name, value in metrics.items()}


def _report_set(found: SetResult) -> EvaluationReport:
    names = list(found.metrics)
    return EvaluationReport(
        metrics=found.metrics,
        standard_errors=compute_standard_errors(found.tasks, names),
        intervals=compute_intervals(found.tasks, names),
    )


def _join(reports: Mapping[str, EvaluationReport]) -> EvaluationReport:
    """Return the means of the metrics common to all sets, and each set's metrics under its name. Sets are independent."""
    count = len(reports)
    shared = [name for name in next(iter(reports.values())).metrics if all(name in each.metrics for each in reports.values())]
    metrics: dict[str, float] = {}
    errors: dict[str, float] = {}
    intervals: dict[str, Interval] = {}
    for name in shared:
        values = [each.metrics[name] for each in reports.values()]
        if name in SUMS:
            continue
        metrics[name] = sum(values) / count
        known = [each.standard_errors[name] for each in reports.values() if name in each.standard_errors]
        if len(known) == count:
            errors[name] = math.sqrt(sum(error * error for error in known)) / count
            intervals[name] = _join_intervals(
                metrics[name], values, [each.intervals.get(name) for each in reports.values()], errors[name]
            )
    for name in SUMS:
        if values := [each.metrics[name] for each in reports.values() if name in each.metrics]:
            metrics[name] = sum(values)
    for set_name, report in reports.items():
        metrics |= {f"{set_name}/{name}": value for name, value in report.metrics.items()}
        errors |= {f"{set_name}/{name}": value for name, value in report.standard_errors.items()}
        intervals |= {f"{set_name}/{name}": value for name, value in report.intervals.items()}
    return EvaluationReport(metrics=metrics, standard_errors=errors, intervals=intervals)


def _join_intervals(mean: float, values: Sequence[float], intervals: Sequence[Interval | None], error: float) -> Interval:
    """Return the interval of a mean over sets: the distances of the sets' own ends from their values, added as independent errors
    (Zou and Donner, 2008), which stays within the bounds of shares."""
    known = [interval for interval in intervals if interval is not None]
    if len(known) < len(values):
        return Interval(mean - NORMAL_95 * error, mean + NORMAL_95 * error)
    below = math.sqrt(sum((value - each.low) ** 2 for value, each in zip(values, known, strict=True))) / len(values)
    above = math.sqrt(sum((each.high - value) ** 2 for value, each in zip(values, known, strict=True))) / len(values)
    return Interval(mean - below, mean + above)


def _find_categories(tasks: Sequence[Mapping[str, Any]]) -> dict[str, CategoryResult]:
    """Return the accuracy by category; empty unless the tasks have several."""
    values: dict[str, list[float]] = {}
    for task in present_tasks(tasks):
        if "category" in task:
            values.setdefault(task["category"], []).append(_mean(sample["accuracy"] for sample in task["samples"]))
    found = {name: CategoryResult(sum(values[name]) / len(values[name]), len(values[name])) for name in sorted(values)}
    return found if len(found) > 1 else {}


def _format_categories(found: Mapping[str, CategoryResult]) -> list[str]:
    width = max(map(len, found)) + 2
    return [f"  {make_printable(name):{width}}{each.accuracy:.4f}  {_count(each.tasks, 'task')}" for name, each in found.items()]


def compute_standard_errors(tasks: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, float]:
    """Return the standard error of each metric that is a mean over tasks, by name; none for a single task.

    Samples of one task are not independent, so a task counts once, with its mean: the standard error is clustered by task.
    """
    return {name: standard_error(values) for name, values in _measure(tasks, names).items() if len(values) > 1}


def compute_intervals(tasks: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Interval]:
    """Return the confidence interval of each metric that is a mean over tasks, by name. For shares (0 to 1), which may be
    uncertain without varying, it is Wilson's and stays within these bounds; for others Student's t.
    """
    intervals: dict[str, Interval] = {}
    for name, values in _measure(tasks, names).items():
        metric = name.rpartition("/")[2].partition("@")[0]
        is_share = metric in SHARES and all(0.0 <= value <= 1.0 for value in values)
        interval = confidence_interval(values, bounds=(0.0, 1.0) if is_share else None)
        if interval.is_bounded:
            intervals[name] = interval
    return intervals


def _measure(tasks: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[float]]:
    """Return each task's contribution to the metrics that are means over tasks, by name."""
    measured: dict[str, list[float]] = {}
    tasks = present_tasks(tasks)
    environments = {task["environment"] for task in tasks}
    for name in names:
        environment, slash, metric = name.rpartition("/")
        chosen = [task for task in tasks if not slash or task["environment"] == environment]
        if metric.startswith(("pass@", "maj@")):
            chosen = [task for task in chosen if len(task["samples"]) >= int(metric.partition("@")[2])]
        measure = _find_measure(metric) if not slash or environment in environments else None
        if measure is not None and chosen:
            measured[name] = [measure(task) for task in chosen]
    return measured


def _find_measure(metric: str) -> Callable[[Mapping[str, Any]], float] | None:
    """Return the function from a task to its contribution to a metric; None for a metric that is not a mean over tasks."""
    name, _, k = metric.partition("@")
    match name:
        case "accuracy" | "avg":
            return lambda task: _mean(sample["accuracy"] for sample in task["samples"])
        case "pass":
            return lambda task: pass_at_k(len(task["samples"]), read_result(task).correct, int(k))
        case "cons":
            return lambda task: read_result(task).consensus(int(k))
        case "maj":
            return lambda task: read_result(task).majority(int(k))
        case "reward":
            return lambda task: _mean(sample["reward"] for sample in task["samples"])
        case "avg_length":
            return lambda task: _mean(sample["tokens"] for sample in task["samples"])
        case "truncated":
            return lambda task: _mean(sample["ending"] in TRUNCATED for sample in task["samples"])
        case _:
            return None


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
