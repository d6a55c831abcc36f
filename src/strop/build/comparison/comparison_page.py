"""A comparison as one HTML file: the verdict, the differences with their intervals as a picture, and the tasks that changed most."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from strop import __version__
from strop.build.comparison.comparison_report import HEADERS, format_row, name_metric
from strop.monitoring.pages.document import PageSection, make_document
from strop.monitoring.pages.interval_drawing import ShownDifference, draw_differences
from strop.monitoring.pages.markup import escape, make_facts, make_list, make_paragraph, make_table
from strop.safety.printable import shorten
from strop.statistics.evaluation_comparison import ChangedTask, Comparison
from strop.statistics.paired_comparison import PairedComparison
from strop.statistics.setting_differences import SettingDifference

NAME_LIMIT = 100  # characters of a side in the title
TEXT_LIMIT = 4000  # characters of a sample


def make_comparison_page(found: Comparison) -> str:
    """Return the page that ``strop compare --html`` writes."""
    better, worse = ("better", "worse") if found.metric.higher_is_better is not None else ("higher", "lower")
    sections = [
        PageSection("verdict", "Verdict", _write_verdict(found)),
        PageSection("differences", "Differences", _write_differences(found)),
        PageSection("better", f"Where B is {better}", _write_tasks(found.won, found.metric.name)),
        PageSection("worse", f"Where B is {worse}", _write_tasks(found.lost, found.metric.name)),
        PageSection("settings", "How both were sampled and scored", _write_settings(found.differences)),
    ]
    verdict = found.verdict
    a, b = (shorten(source.partition(": ")[0], NAME_LIMIT) for source in found.sources)
    return make_document(
        f"{b} (B) compared with {a} (A): {found.metric.name}",
        f"{verdict[0].upper()}{verdict[1:]}.",
        sections,
        footer=f"strop compare {__version__}, {time.strftime('%Y-%m-%d %H:%M')}. This page needs no network and runs nothing that a "
        "model wrote.",
    )


def _write_verdict(found: Comparison) -> str:
    a, b = found.samples
    facts = [
        ("A", found.sources[0]),
        ("B", found.sources[1]),
        ("tasks", f"{found.total.tasks:,}"),
        ("samples", f"{a} of each" if a == b else f"{a} of each in A, {b} in B"),
    ]
    lines = [*found.forecast, *found.notes]
    verdict = found.verdict
    return make_paragraph(f"{verdict[0].upper()}{verdict[1:]}.") + make_facts(facts) + (make_list(lines) if lines else "")


def _write_differences(found: Comparison) -> str:
    shown: dict[str, PairedComparison] = dict(found.sets)
    if len(found.sets) > 1:
        shown["mean of sets"] = found.total
    scale = 100.0 if found.metric.is_share else 1.0
    drawn = [_scale(name, each, scale) for name, each in shown.items()]
    unit = "points" if found.metric.is_share else found.metric.name
    picture = draw_differences(drawn, f"B - A in {unit}, with {100 * found.total.level:g} % intervals")
    rows = [format_row(name, each, found.metric) for name, each in shown.items()]
    others = [format_row(name_metric(metric), each, metric) for metric, each in found.others.items() if each.a or each.b]
    headers = _name_headers(found.total.level)
    parts = [picture, make_table((name_metric(found.metric), *headers), rows, caption="by the metric asked for", numbers=True)]
    if len(found.sets) > 1:
        parts.append(make_paragraph("The p-values of the sets are corrected for their number (Holm).", kind="note"))
    if others:
        parts.append(make_table(("metric", *headers), others, caption="for information, each by itself", numbers=True))
    return "".join(parts)


def _name_headers(level: float) -> Sequence[str]:
    return [f"{100 * level:g} % interval" if name == "interval" else name for name in HEADERS]


def _scale(name: str, each: PairedComparison, scale: float) -> ShownDifference:
    return ShownDifference(name, scale * each.difference, scale * each.interval.low, scale * each.interval.high)


def _write_tasks(tasks: Sequence[ChangedTask], metric: str) -> str:
    if not tasks:
        return make_paragraph("No task.")
    return make_paragraph("The largest differences, each with the sample that shows it.", kind="note") + "".join(
        _write_task(task, metric) for task in tasks
    )


def _write_task(task: ChangedTask, metric: str) -> str:
    expected = "" if task.answer in (None, "") else f", expected {shorten(str(task.answer), 200)}"
    title = f"{task.task}: {task.a:.3g} to {task.b:.3g} {metric}{expected}"
    sides = "".join(
        f'<div class="side"><h4>{name}</h4><p class="text">{escape(shorten(text, TEXT_LIMIT))}</p></div>\n'
        for name, text in (("A", task.a_sample), ("B", task.b_sample))
    )
    return (
        f'<div class="pair"><h3>{escape(title)}</h3>\n<p class="text given">{escape(shorten(task.question, TEXT_LIMIT))}</p>\n'
        f'<div class="sides">{sides}</div></div>\n'
    )


def _write_settings(differences: Sequence[SettingDifference]) -> str:
    if not differences:
        return make_paragraph("No difference is known; the notes above say if it is not stored how one of them was sampled.")
    rows: list[Mapping[str, object]] = [vars(each) for each in differences]
    names = list(rows[0])
    return make_table(names, [[shorten(str(row[name]), 300) for name in names] for row in rows], caption="settings that differ")
