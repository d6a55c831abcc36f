"""A comparison as text: where it is from, a table, the verdict, and the tasks that changed most."""

from __future__ import annotations

from collections.abc import Sequence

from strop.safety.printable import make_printable
from strop.statistics.evaluation_comparison import ChangedTask, Comparison
from strop.statistics.paired_comparison import PairedComparison
from strop.statistics.task_metrics import TaskMetric

TEXT_SHOWN = 160
HEADERS = ("tasks", "A", "B", "B - A", "interval", "p", "B higher", "B lower")


def format_comparison(found: Comparison) -> str:
    """Return the report that ``strop compare`` prints."""
    a, b = found.samples
    each = f"{a} of each" if a == b else f"{a} of each in A, {b} in B"
    lines = [
        f"A  {found.sources[0]}",
        f"B  {found.sources[1]}",
        f"{found.total.tasks:,} tasks, samples: {each}",
        *found.notes,
        "",
    ]
    lines += [*_format_tables(found), "", *_wrap_verdict(found)]
    better, worse = ("better", "worse") if found.metric.higher_is_better is not None else ("higher", "lower")
    for title, tasks in ((f"B {better}", found.won), (f"B {worse}", found.lost)):
        lines += ["", f"{title}, the largest differences:"] if tasks else []
        for task in tasks:
            lines += _format_task(task, found.metric)
    return "\n".join(make_printable(line) for line in lines)


def _wrap_verdict(found: Comparison) -> list[str]:
    verdict = found.verdict
    lines = [verdict[0].upper() + verdict[1:] + "."]
    if len(found.sets) > 1:
        lines.append("It is of the plain mean of the sets; the p-values of the sets are corrected for their number (Holm).")
    return lines + [f"  {sentence}" for sentence in found.forecast]


def _format_tables(found: Comparison) -> list[str]:
    level = f"{100 * found.total.level:g} %"
    header = ["", *(f"{level} interval" if name == "interval" else name for name in HEADERS)]
    several = len(found.sets) > 1
    rows = [format_row(name, each, found.metric) for name, each in found.sets.items()]
    rows += [format_row("mean of sets", found.total, found.metric)] if several else []
    main = _align([[name_metric(found.metric), *header[1:]], *rows])
    others = [format_row(name_metric(metric), each, metric) for metric, each in found.others.items() if each.a or each.b]
    return [*main, "", "For information, each by itself:", *_align([header, *others])]


def name_metric(metric: TaskMetric) -> str:
    return f"{metric.name}, %" if metric.is_share else metric.name


def format_row(name: str, found: PairedComparison, metric: TaskMetric) -> list[str]:
    scale, form, sign = (100, ".1f", "+.1f") if metric.is_share else (1, ".4g", "+.4g")
    low, high = (f"{scale * end:{sign}}" for end in (found.interval.low, found.interval.high))
    p_value = found.adjusted_p_value
    return [
        name,
        f"{found.tasks:,}",
        f"{scale * found.a:{form}}",
        f"{scale * found.b:{form}}",
        f"{scale * found.difference:{sign}}",
        f"{low} to {high}",
        "<0.001" if p_value < 0.001 else f"{p_value:.3f}",
        f"{found.higher:,}",
        f"{found.lower:,}",
    ]


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _format_task(task: ChangedTask, metric: TaskMetric) -> list[str]:
    expected = "" if task.answer in (None, "") else f", expected {_shorten(str(task.answer))}"
    return [
        f"  {task.task}: {task.a:.3g} -> {task.b:.3g} {metric.name}{expected}",
        f"    {_shorten(task.question)}",
        f"    A: {_shorten(task.a_sample)}",
        f"    B: {_shorten(task.b_sample)}",
    ]


def _shorten(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= TEXT_SHOWN else f"{shown[: TEXT_SHOWN // 2]} ... {shown[-TEXT_SHOWN // 2 :]}"
