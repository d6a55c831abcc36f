"""Compares two evaluations: by set and as a whole, by the requested metric and by others, with the verdict in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from strop.extensions.comparison.matched_tasks import (
    Identity,
    MatchedTask,
    SettingDifference,
    StoredTask,
    list_setting_differences,
    match_tasks,
    read_question,
)
from strop.extensions.comparison.paired_comparison import (
    POWER,
    PairedComparison,
    PairedValues,
    adjust_p_values,
    compare_paired,
    forecast_more_samples,
    forecast_more_tasks,
    sign_flip_p_value,
)
from strop.extensions.evaluation.statistics import SHARE, Interval, NotComparable, TaskMetric, find_task_metric, list_task_metrics
from strop.statistics import present_tasks


def describe_verdict(found: PairedComparison, metric: TaskMetric, margin: float | None = None) -> str:
    """Return the result of a comparison in a sentence."""
    p_value = found.adjusted_p_value
    shown = "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"
    size = f"{format_difference(found.difference, metric)}, {format_interval(found, metric)}, {shown}"
    what = "" if metric.name == "accuracy" else f" in {metric.name}"
    higher = found.higher_one
    if higher is None:
        sentence = f"no difference{what} can be seen"
    elif metric.higher_is_better is None:
        sentence = f"{higher.upper()} is higher{what}"
    else:
        sentence = f"{'B' if (higher == 'b') == metric.higher_is_better else 'A'} is better{what}"
    if margin is not None and found.is_equivalent(margin):
        within = f"the two are equivalent{what} within {format_size(margin, metric)}"
        return f"{within}: {size}" if higher is None else f"{sentence}, and {within}: {size}"
    if found.higher == found.lower == 0:
        return f"{sentence}, the two are equal in {'the only task' if found.tasks == 1 else f'all {found.tasks:,} tasks'}: {size}"
    return f"{sentence}: {size}"


def describe_forecast(found: PairedComparison, metric: TaskMetric, margin: float | None = None) -> list[str]:
    """Return what a decision would need, one sentence each; empty if it is decided."""
    if found.higher_one is not None or (margin is not None and found.is_equivalent(margin)):
        return []
    if not math.isfinite(found.detectable):
        return ["one task does not show how much tasks vary; evaluate more"]
    sought = abs(found.difference) if margin is None else margin
    visible = format_size(found.detectable, metric)
    lines = [f"{found.tasks:,} tasks detect a difference of {visible} with probability {POWER:g}"]
    if sought == 0:
        return [*lines, "there is no difference that more tasks could confirm"]
    what = f"a difference of {format_size(sought, metric)}{', as found,' if margin is None else ''}"
    if found.more_tasks is None:
        lines.append(f"{what} is too small to be detected by any practical number of tasks")
    elif found.more_tasks:
        lines.append(f"{what} takes {found.tasks + found.more_tasks:,} tasks, {found.more_tasks:,} more")
    if found.sampling_variance is None:
        lines.append("with one sample per task, it is unknown whether more samples would help")
    elif found.more_samples is None:
        lines.append("more samples per task would not suffice: the tasks themselves vary too much")
    elif found.more_samples > 1:
        lines.append(f"or {found.more_samples:,.{1 if found.more_samples < 10 else 0}f} times as many samples of each task")
    return lines


def format_difference(value: float, metric: TaskMetric) -> str:
    return f"{100 * value:+.1f} points" if metric.is_share else f"{value:+.4g}"


def format_size(value: float, metric: TaskMetric) -> str:
    return f"{100 * value:.1f} points" if metric.is_share else f"{value:.4g}"


def format_interval(found: PairedComparison, metric: TaskMetric) -> str:
    scale, form = (100, "+.1f") if metric.is_share else (1, "+.4g")
    return f"{100 * found.level:g} % interval {scale * found.interval.low:{form}} to {scale * found.interval.high:{form}}"


MOST_NAMED = 6  # settings in a note


@dataclass(frozen=True, kw_only=True)
class ChangedTask:
    """A task on which two evaluations differ, with a sample of each that shows it: the best of one and the worst of the other."""

    task: str
    set_name: str
    question: str
    answer: str | None  # the expected one
    a: float
    b: float
    a_sample: str
    b_sample: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two evaluations on the same tasks."""

    metric: TaskMetric
    margin: float | None  # differences below this do not matter
    total: PairedComparison  # over all tasks, or the plain mean of several sets
    sets: Mapping[str, PairedComparison]
    others: Mapping[TaskMetric, PairedComparison]  # the total, by other metrics
    samples: tuple[str, str]  # per task, in A and in B: 4, or 1 to 4
    only_a: int  # tasks
    only_b: int
    won: tuple[ChangedTask, ...]  # tasks that B does better, the largest differences first
    lost: tuple[ChangedTask, ...]
    notes: tuple[str, ...] = ()
    sources: tuple[str, str] = ("A", "B")  # which evaluations were compared
    differences: tuple[SettingDifference, ...] = ()  # in how the two were sampled and scored

    @property
    def better(self) -> Literal["a", "b"] | None:
        """Which of the two is better; None if there is no significant difference, or the metric has no preferred direction."""
        higher, good = self.total.higher_one, self.metric.higher_is_better
        return None if good is None or higher is None else higher if good else "a" if higher == "b" else "b"

    @property
    def verdict(self) -> str:
        return describe_verdict(self.total, self.metric, self.margin)

    @property
    def forecast(self) -> list[str]:
        """What is needed for a decision, one sentence each."""
        return describe_forecast(self.total, self.metric, self.margin)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "metric": self.metric.name,
            "verdict": self.verdict,
            "better": self.better,
            "forecast": self.forecast,
            "margin": self.margin,
            "total": _as_dict(self.total),
            "sets": {name: _as_dict(each) for name, each in self.sets.items()},
            "metrics": {metric.name: _as_dict(each) for metric, each in self.others.items()},
            "samples": {"a": self.samples[0], "b": self.samples[1]},
            "only_a": self.only_a,
            "only_b": self.only_b,
            "won": [vars(task) for task in self.won],
            "lost": [vars(task) for task in self.lost],
            "notes": list(self.notes),
            "differences": [vars(each) for each in self.differences],
            "sources": {"a": self.sources[0], "b": self.sources[1]},
        }

    def __repr__(self) -> str:
        return f"Comparison({self.verdict!r})"


def compare_evaluations(
    a: Sequence[StoredTask],
    b: Sequence[StoredTask],
    *,
    metric: str = "accuracy",
    level: float = 0.95,
    margin: float | None = None,
    shown: int = 3,
    identities: tuple[Identity | None, Identity | None] | None = None,
) -> Comparison:
    """Compare the stored tasks of two evaluations, task by task.

    Args:
        a, b: The tasks with their samples, as an evaluation stores them.
        metric: accuracy, avg@n, pass@k, cons@k, reward, avg_length, truncated or errors.
        level: The probability that an interval holds the true difference.
        margin: A difference that does not matter, in the units of the metric; the two may then be found equivalent.
        shown: Number of tasks with the largest changes to keep, both won and lost.
        identities: How each was sampled and scored, as stored with the tasks; None if unknown.

    Raises NotComparable if the tasks are not the same, or do not have the metric.
    """
    matched = match_tasks(present_tasks(a), present_tasks(b))
    both = [side for task in matched.tasks for side in (task.a, task.b)]
    chosen = check_options(metric, level, margin).fit(both)
    by_set: dict[str, list[MatchedTask]] = {}
    for task in matched.tasks:
        by_set.setdefault(task.set_name, []).append(task)
    sets, total = _compare_sets(by_set, chosen, level, margin)
    others = [find_task_metric(name).fit(both) for name in list_task_metrics(both) if name != metric]
    changed = _list_changed(matched.tasks, chosen)
    ours, theirs = identities or (None, None)
    differences = [] if ours is None or theirs is None else list_setting_differences(ours, theirs)
    return Comparison(
        metric=chosen,
        margin=margin,
        total=total,
        sets=sets,
        others={other: _compare_sets(by_set, other, level, None)[1] for other in others},
        samples=(_count_samples([task.a for task in matched.tasks]), _count_samples([task.b for task in matched.tasks])),
        only_a=matched.only_a,
        only_b=matched.only_b,
        won=tuple(changed[True][:shown]),
        lost=tuple(changed[False][:shown]),
        notes=(
            *_note_settings(differences),
            *_note(matched.only_a, matched.only_b, matched.reworded),
            *([] if identities is None else _note_unknown(identities)),
        ),
        differences=tuple(differences),
    )


def check_options(metric: str, level: float, margin: float | None) -> TaskMetric:
    """Return the metric of a name. Raises NotComparable for options that cannot work."""
    chosen = find_task_metric(metric)
    if not 0.5 <= level < 1:
        raise NotComparable(f"level is {level:g}; it must be from 0.5 to below 1, such as 0.95")
    if margin is not None and not 0 < margin < (1.0 if chosen.is_share else math.inf):
        wanted = (
            "between 0 and 1, as the metric is: 0.02 is 2 points" if chosen.is_share else "above 0, in the units of the metric"
        )
        raise NotComparable(f"margin is {margin:g}; it must be {wanted}")
    return chosen


def _compare_sets(
    by_set: Mapping[str, Sequence[MatchedTask]], metric: TaskMetric, level: float, margin: float | None
) -> tuple[dict[str, PairedComparison], PairedComparison]:
    """Compare set by set, with p-values corrected for their number, and all of them."""
    values = {name: _read_values(tasks, metric) for name, tasks in by_set.items()}
    found = {name: compare_paired(each, level=level, margin=margin) for name, each in values.items()}
    if len(found) == 1:
        return found, next(iter(found.values()))
    adjusted = adjust_p_values([each.p_value for each in found.values()])
    found = {name: replace(each, adjusted_p_value=p) for (name, each), p in zip(found.items(), adjusted, strict=True)}
    return found, _average(found, values, margin)


def _average(sets: Mapping[str, PairedComparison], values: Mapping[str, PairedValues], margin: float | None) -> PairedComparison:
    """Return the comparison of plain means over sets, whose samples are independent."""
    found, tasks = list(sets.values()), sum(each.tasks for each in sets.values())
    difference = math.fsum(each.difference for each in found) / len(found)
    weighted = [part / each.tasks for name, each in sets.items() for part in values[name].differences]
    p_value, level = sign_flip_p_value(weighted), found[0].level

    def pool(variance: Callable[[PairedComparison], float]) -> float:
        return tasks * math.fsum(variance(each) / each.tasks for each in found) / len(found) ** 2

    variance = pool(lambda each: each.variance)
    known = all(each.sampling_variance is not None for each in found)
    sampling = pool(lambda each: each.sampling_variance or 0.0) if known else None
    sought = difference if margin is None else margin
    return PairedComparison(
        tasks=tasks,
        a=math.fsum(each.a for each in found) / len(found),
        b=math.fsum(each.b for each in found) / len(found),
        a_interval=_average_intervals([(each.a, each.a_interval) for each in found]),
        b_interval=_average_intervals([(each.b, each.b_interval) for each in found]),
        difference=difference,
        interval=_average_intervals([(each.difference, each.interval) for each in found]),
        p_value=p_value,
        adjusted_p_value=p_value,
        level=level,
        higher=sum(each.higher for each in found),
        lower=sum(each.lower for each in found),
        variance=variance,
        sampling_variance=sampling,
        more_tasks=forecast_more_tasks(sought, variance, tasks, level=level),
        more_samples=forecast_more_samples(sought, variance, sampling, tasks, level=level),
        detectable=math.hypot(*(each.detectable for each in found)) / len(found),
    )


def _average_intervals(parts: Sequence[tuple[float, Interval]]) -> Interval:
    """Return the interval of the mean of independent estimates: squared distances to the interval ends add up."""
    mean = math.fsum(value for value, _ in parts) / len(parts)
    below = math.hypot(*(value - interval.low for value, interval in parts)) / len(parts)
    above = math.hypot(*(interval.high - value for value, interval in parts)) / len(parts)
    return Interval(mean - below, mean + above)


def _read_values(tasks: Sequence[MatchedTask], metric: TaskMetric) -> PairedValues:
    a, b, names = (
        [metric.value(task.a) for task in tasks],
        [metric.value(task.b) for task in tasks],
        [task.name for task in tasks],
    )
    noise = [[metric.noise(side) for side in sides] for sides in ([task.a for task in tasks], [task.b for task in tasks])]
    known = [[each for each in side if each is not None] for side in noise]
    complete = all(len(side) == len(tasks) for side in known)
    return PairedValues(
        a=a,
        b=b,
        a_noise=known[0] if complete else None,
        b_noise=known[1] if complete else None,
        bounds=SHARE if metric.is_share else None,
        clusters=names if len(set(names)) < len(names) else None,
    )


def _list_changed(tasks: Sequence[MatchedTask], metric: TaskMetric) -> dict[bool, list[ChangedTask]]:
    """Return the tasks that B does better (True) and worse (False), the largest differences first."""
    good = -1.0 if metric.higher_is_better is False else 1.0
    valued = [(metric.value(task.a), metric.value(task.b), task) for task in tasks]
    changed: dict[bool, list[ChangedTask]] = {True: [], False: []}
    for a, b, task in sorted(valued, key=lambda each: -abs(each[1] - each[0])):
        if a != b:
            won = good * (b - a) > 0
            changed[won].append(
                ChangedTask(
                    task=task.name,
                    set_name=task.set_name,
                    question=read_question(task.a),
                    answer=task.a.get("answer"),
                    a=a,
                    b=b,
                    a_sample=_read_sample(task.a, best=not won),
                    b_sample=_read_sample(task.b, best=won),
                )
            )
    return changed


def _read_sample(task: StoredTask, *, best: bool) -> str:
    """Return the text of a task's best or worst sample."""
    choose = max if best else min
    return str(choose(task["samples"], key=lambda sample: float(sample["accuracy"])).get("completion", ""))


def _count_samples(tasks: Sequence[StoredTask]) -> str:
    counts = Counter(len(task["samples"]) for task in tasks)
    return str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def _note_settings(differences: Sequence[SettingDifference]) -> list[str]:
    if not differences:
        return []
    named = "; ".join(map(str, differences[:MOST_NAMED]))
    more = f"; and {len(differences) - MOST_NAMED} more" if len(differences) > MOST_NAMED else ""
    return [f"A and B were sampled and scored differently, which affects the result: {named}{more}"]


def _note_unknown(identities: tuple[Identity | None, Identity | None]) -> list[str]:
    unknown = [name for name, identity in zip("AB", identities, strict=True) if identity is None]
    if not unknown:
        return []
    return [
        f"how {' and '.join(unknown)} {'were' if len(unknown) > 1 else 'was'} sampled and scored is not stored (older versions did not): "
        "temperature, prompt and grader may differ"
    ]


def _note(only_a: int, only_b: int, reworded: bool) -> list[str]:
    notes = []
    if only_a or only_b:
        notes.append(f"left out: {only_a:,} {'task' if only_a == 1 else 'tasks'} that only A has, {only_b:,} that only B has")
    if reworded:
        notes.append("the prompts around the questions differ between A and B, and are part of what is compared")
    return notes


def _as_dict(found: PairedComparison) -> dict[str, Any]:
    values = vars(found) | {name: _ends(getattr(found, name)) for name in ("interval", "a_interval", "b_interval")}
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()} | {
        "higher_one": found.higher_one
    }


def _ends(interval: Interval) -> list[float | None]:
    return [end if math.isfinite(end) else None for end in (interval.low, interval.high)]
