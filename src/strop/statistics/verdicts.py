"""Comparisons in words: which run is better, and what a decision would need."""

from __future__ import annotations

import math

from strop.statistics.paired_comparison import POWER, PairedComparison
from strop.statistics.task_metrics import TaskMetric


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
