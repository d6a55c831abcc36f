"""The report of a run as one HTML file, to hand to a colleague."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from strop import __version__
from strop.monitoring.console.columns import TOTAL_TIME, format_duration, format_number, format_seconds, phase_times
from strop.monitoring.pages.curve_drawing import draw_curve, draw_phases
from strop.monitoring.pages.document import PageSection, make_document
from strop.monitoring.pages.markup import escape, make_code, make_details, make_facts, make_list, make_paragraph, make_table
from strop.monitoring.plot import CURVES, Curve, choose_curves
from strop.monitoring.profiling.step_profiler import PROFILES_FOLDER
from strop.monitoring.rollout_store.rollout_record import RolloutRecord
from strop.monitoring.rollout_store.token_ratios import TokenRatio
from strop.runs.run_report.report_facts import ReportFacts, list_repeat_commands
from strop.runs.run_report.sample_pairs import TEXT_LIMIT, SamplePair, score
from strop.safety.printable import shorten

NO_BREAK = "\u00a0"
SHORT_PHASE = 0.02  # of the time of all steps
VALUE_LIMIT = 300  # characters of a setting
MOST_METRICS = 400  # in the table of all metrics
MISMATCH = {
    "train/token_mult_prob_error": "exp |learner - sampler|, mean over tokens; 1 is none",
    "train/token_mult_prob_error_max": "the same, of the worst token",
    "train/gen_kl_error": "KL(sampler, learner), nats a token",
    "train/token_ratio_above_2": "share of tokens that differ by a factor above 2",
    "train/router_disagreement": "share of expert choices that differ",
}


def make_report(facts: ReportFacts) -> str:
    """Return the page."""
    sections = [
        PageSection("summary", "Summary", _write_summary(facts)),
        PageSection("curves", "Curves", _write_curves(facts)),
        PageSection("validation", "Validation", _write_validation(facts)),
        PageSection("samples", "Samples before and after", _write_samples(facts)),
        PageSection("mismatch", "Sampler and learner", _write_mismatch(facts)),
        PageSection("profiles", "Profiles", _write_profiles(facts)),
        PageSection("incidents", "Incidents", _write_incidents(facts)),
        PageSection("configuration", "Configuration", _write_configuration(facts)),
        PageSection("environment", "Packages, hardware and data", _write_environment(facts)),
        PageSection("repeat", "How to repeat it", _write_repeat(facts)),
    ]
    model = facts.find_setting("policy", "model_name") or "a model"
    algorithm = facts.find_setting("algorithm", "name") or facts.section or "training"
    return make_document(
        f"{facts.name}: report of a run",
        f"{algorithm} on {model}, {facts.steps[-1][0]} steps; {facts.ended}.",
        sections,
        footer=f"strop report {__version__}, {time.strftime('%Y-%m-%d %H:%M')}. From the files in {facts.folder.resolve().name}; this page "
        "needs no network and runs nothing that the model wrote.",
    )


def _series(facts: ReportFacts, tag: str) -> list[tuple[float, float]]:
    return [(float(step), values[tag]) for step, values in facts.steps if math.isfinite(values.get(tag, math.nan))]


# --- summary and curves ---


def _write_summary(facts: ReportFacts) -> str:
    tiles = "".join(
        f'<li><span class="name">{escape(name)}</span><span class="value">{escape(value)}</span>'
        f'<span class="more">{escape(more.replace(" %", NO_BREAK + "%"))}</span></li>'
        for name, value, more in _list_tiles(facts)
    )
    return f'<ul class="tiles">{tiles}</ul>\n'


def _list_tiles(facts: ReportFacts) -> Iterator[tuple[str, str, str]]:
    results = facts.validations
    if results is not None:
        first, last = results.points[0], results.points[-1]
        low, high = (_format_value(end, results.is_share) for end in (last.interval.low, last.interval.high))
        before = f", from {_format_value(first.mean, results.is_share)}" if last.step != first.step else ""
        yield f"validation {results.metric}", _format_value(last.mean, results.is_share), f"95 %: {low} to {high}{before}"
    for curve in CURVES:
        if curve.tag in ("train/reward", "train/loss", "validation/loss", "train/accuracy") and (
            points := _series(facts, curve.tag)
        ):
            yield (
                curve.title.lower(),
                format_number(points[-1][1]),
                f"from {format_number(points[0][1])} at step {points[0][0]:g}",
            )
    yield "steps", f"{facts.steps[-1][0]}", facts.ended.partition(",")[0]
    times = [value for _, value in _series(facts, TOTAL_TIME)]
    if times:
        yield "time of all steps", format_duration(sum(times)), f"{format_seconds(median(times))} in the median"
    if tokens := _series(facts, "train/total_tokens"):
        yield "tokens trained on", f"{tokens[-1][1]:,.0f}", ""
    serious = sum(each.kind not in ("count", "settings") for each in facts.incidents)
    yield "incidents", str(serious), "see below" if facts.incidents else "none known"


def _write_curves(facts: ReportFacts) -> str:
    shown = choose_curves(facts.steps)
    figures = [draw_curve(curve, points) for curve in shown if (points := _series(facts, curve.tag))]
    timed = _list_phases(facts)
    figures += [draw_phases(timed)] if timed else []
    panels = f'<div class="panels">\n{"".join(figures)}</div>\n'
    note = (
        "The number of a curve is its last value. The strong line is a moving average over a tenth of the steps, where a curve is long; "
        "the pale one has every value."
    )
    tags = sorted({tag for _, values in facts.steps for tag in values})
    rows = [_summarize_metric(tag, facts) for tag in tags[:MOST_METRICS]]
    table = make_table(
        ("metric", "first", "last", "lowest", "highest", "steps"),
        [row for row in rows if row],
        caption="every metric",
        numbers=True,
    )
    more = f" of {len(tags)}" if len(tags) > MOST_METRICS else ""
    return panels + make_paragraph(note, kind="note") + make_details(f"All metrics: {len(rows)}{more}", table)


def _list_phases(facts: ReportFacts) -> list[tuple[float, dict[str, float]]]:
    """Return the seconds of each phase by step; phases that take next to nothing of the run are together."""
    timed = [(float(step), phases) for step, values in facts.steps if (phases := phase_times(values))]
    totals: dict[str, float] = {}
    for phase in (phase for _, phases in timed for phase in phases):
        totals[phase.name] = totals.get(phase.name, 0.0) + phase.seconds
    main = [name for name, seconds in totals.items() if seconds >= SHORT_PHASE * sum(totals.values())]
    rows = []
    for step, phases in timed:
        seconds = {phase.name: phase.seconds for phase in phases}
        rows.append((step, {name: seconds.pop(name, 0.0) for name in main if name != "other"} | {"other": sum(seconds.values())}))
    return rows


def _summarize_metric(tag: str, facts: ReportFacts) -> tuple[str, ...]:
    values = [value for _, value in _series(facts, tag)]
    if not values:
        return ()
    return (tag, *(format_number(value) for value in (values[0], values[-1], min(values), max(values))), str(len(values)))


# --- validation and samples ---


def _write_validation(facts: ReportFacts) -> str:
    results = facts.validations
    if results is None:
        logged = [curve for curve in CURVES if curve.tag.startswith("validation/") and _series(facts, curve.tag)]
        if not logged:
            return make_paragraph("This run has not validated (val_period, val_at_start, val_at_end).")
        return make_paragraph(
            "No samples of validations are stored, as for recorded data, whose validation is a loss: intervals over tasks are not known."
        ) + make_table(
            ("metric", "first", "last", "lowest", "highest", "validations"),
            [_summarize_metric(curve.tag, facts) for curve in logged],
            caption="logged metrics of the validations",
            numbers=True,
        )
    points = [(float(point.step), point.mean) for point in results.points]
    bands = [(float(point.step), point.interval.low, point.interval.high) for point in results.points]
    curve = Curve(f"Validation {results.metric}, with 95 % intervals", f"validation/{results.metric}", share=results.is_share)
    rows = [
        (
            f"step {point.step}",
            f"{point.tasks:,}",
            point.samples,
            _format_value(point.mean, results.is_share),
            f"{_format_value(point.interval.low, results.is_share)} to {_format_value(point.interval.high, results.is_share)}",
        )
        for point in results.points
    ]
    table = make_table(
        ("validation", "tasks", "samples of each", results.metric, "95 % interval"), rows, caption="validations", numbers=True
    )
    figure = f'<div class="panels">{draw_curve(curve, points, bands)}</div>\n'
    left = f" {results.left_out} validations are not shown." if results.left_out else ""
    note = (
        "Each interval is of its own mean over tasks, as if they were drawn from a larger set. Two may overlap although the paired "
        f"difference of the same tasks, above, is more than chance.{left}"
    )
    return _write_verdict(facts) + figure + table + make_paragraph(note, kind="note")


def _write_verdict(facts: ReportFacts) -> str:
    assert facts.validations is not None
    found = facts.validations.comparison
    if found is None:
        return ""
    first, last = facts.validations.steps[0], facts.validations.steps[-1]
    lines = [
        f"From the first validation (A, step {first}) to the last (B, step {last}), on the same {found.total.tasks:,} tasks: "
        f"{found.verdict}."
    ]
    return make_paragraph(" ".join((*lines, *(f"{each}." for each in found.notes))))


def _format_value(value: float, is_share: bool) -> str:
    return f"{100 * value:.1f} %" if is_share else format_number(value)


def _write_samples(facts: ReportFacts) -> str:
    pairs, unread = facts.pairs, "".join(map(make_paragraph, facts.unread))
    if pairs is None:
        return unread + make_paragraph(
            "No task was sampled at two steps that are stored. Validate at the start and at the end (val_at_start, val_at_end) to see the "
            "same tasks before and after."
        )
    said = (
        f"Of {pairs.tasks:,} different tasks that were sampled both at step {pairs.first} and at step {pairs.last} of {pairs.source}, "
        f"{pairs.better:,} became better, {pairs.worse:,} worse, and {pairs.same:,} did not change. Shown are the largest changes both "
        "ways and the first tasks without one; of each task its first sample."
    )
    return unread + make_paragraph(said) + "".join(_write_pair(pair, pairs.first, pairs.last) for pair in pairs.shown)


def _write_pair(pair: SamplePair, first: int, last: int) -> str:
    expected = f", expected {shorten(pair.answer, 200)}" if pair.answer else ""
    title = f"{pair.environment} {pair.task}: {pair.before_mean:.3g} to {pair.after_mean:.3g}{expected}"
    return (
        f'<div class="pair"><h3>{escape(title)}</h3>\n<p class="text given">{escape(shorten(pair.question, TEXT_LIMIT))}</p>\n'
        f'<div class="sides">{_write_side(pair.before, f"step {first}")}'
        f"{_write_side(pair.after, f'step {last}', pair.before)}</div></div>\n"
    )


def _write_side(record: RolloutRecord, name: str, before: RolloutRecord | None = None) -> str:
    """``before``: what it is better or worse than, which colours its heading."""
    change = 0.0 if before is None else score(record) - score(before)
    kind = ' class="good"' if change > 0 else ' class="bad"' if change < 0 else ""
    ending = f", ended by {record.ending}" if record.ending else ""
    error = f", {record.error}" if record.error else ""
    texts = [(turn.role, turn.text) for turn in record.turns] or [("assistant", record.completion)]
    messages = "".join(_write_message(role, text, named=len(texts) > 1) for role, text in texts)
    return f'<div class="side"><h4{kind}>{escape(f"{name}: {score(record):.3g}{ending}{error}")}</h4>\n{messages}</div>\n'


def _write_message(role: str, text: str, *, named: bool) -> str:
    kind = "text" if role == "assistant" else "text given"
    return f'<p class="{kind}">{escape((f"{role}: " if named else "") + shorten(text, TEXT_LIMIT))}</p>\n'


# --- mismatch and incidents ---


def _write_mismatch(facts: ReportFacts) -> str:
    rows = [
        (f"{tag.removeprefix('train/')}: {meaning}", *summary[1:])
        for tag, meaning in MISMATCH.items()
        if (summary := _summarize_metric(tag, facts))
    ]
    if not rows:
        return make_paragraph("Nothing is sampled in this run, so there is no sampler to compare with the learner.")
    parts = [
        make_table(
            ("measure", "first", "last", "lowest", "highest", "steps"),
            rows,
            caption="How far the log-probabilities of the engine that sampled and of the learner are apart, before each update",
            numbers=True,
        )
    ]
    if facts.worst_tokens:
        tokens = [_describe_token(each) for each in facts.worst_tokens]
        table = make_table(
            ("learner - sampler", "token", "after", "sampler", "learner", "task"),
            tokens,
            caption=f"the tokens of step {facts.worst_tokens[0].step} that differ most, in nats",
        )
        parts.append(make_details(f"The tokens of step {facts.worst_tokens[0].step} that differ most", table))
    return "".join(parts)


def _describe_token(each: TokenRatio) -> tuple[str, ...]:
    logprobs = (f"{each.sampler_logprob:.3f}", f"{each.learner_logprob:.3f}")
    return f"{each.log_ratio:+.4f}", repr(each.text), shorten(repr(each.context), 120), *logprobs, each.task_id


def _write_profiles(facts: ReportFacts) -> str:
    traces = sorted(path.name for path in (facts.folder / PROFILES_FOLDER).glob("step_*.json.gz"))
    if not traces:
        return make_paragraph("No step was recorded (logger.profile.steps).")
    return make_paragraph(f"Traces in {PROFILES_FOLDER}/, which open in Perfetto or Chromium's DevTools: {', '.join(traces)}.")


def _write_incidents(facts: ReportFacts) -> str:
    if not facts.incidents:
        return make_paragraph("None is recorded: no restart, no warning among the last notes, no dropped group, no alarm.")
    rows = [(each.kind, each.when, each.text) for each in facts.incidents]
    return make_table(
        ("kind", "when", "what"), rows, caption="restarts, changes, warnings, failures and counts"
    ) + make_paragraph(
        "Warnings and reports of the watchdog are those among the last 20 that the run's status keeps.", kind="note"
    )


# --- configuration and how to repeat it ---


def _write_configuration(facts: ReportFacts) -> str:
    whole = make_details(
        "The whole configuration, as it was resolved", make_code(facts.config_text or "(there is no config.yaml)")
    )
    if facts.changed is None:
        return (
            make_paragraph("The defaults of this configuration are not known to this version, so differences are not listed.")
            + whole
        )
    rows = [
        (each.key, _show_value(each.value), _show_value(each.default) if each.known else "(no default)") for each in facts.changed
    ]
    return make_table(("key", "this run", "default"), rows, caption=f"{len(rows)} settings differ from the defaults") + whole


def _show_value(value: Any) -> str:
    return shorten("null" if value is None else str(value).lower() if isinstance(value, bool) else str(value), VALUE_LIMIT)


def _write_environment(facts: ReportFacts) -> str:
    start = facts.starts[-1] if facts.starts else None
    parts = ["<h3>Packages</h3>\n", _facts_or(facts.versions, "The versions are not recorded.")]
    parts += [
        "<h3>Hardware</h3>\n",
        _facts_or({} if start is None else start.hardware, "The hardware is not recorded: an older run."),
    ]
    parts += [
        "<h3>Data, weights and code</h3>\n",
        _facts_or({} if start is None else start.data, "Fingerprints of the data are not recorded: an older run."),
    ]
    return "".join(parts)


def _facts_or(rows: Mapping[str, str], otherwise: str) -> str:
    return make_facts(rows.items()) if rows else make_paragraph(otherwise)


def _write_repeat(facts: ReportFacts) -> str:
    parts: list[str] = []
    lines: Sequence[str] = list_repeat_commands(facts)
    if facts.command:
        parts += [make_paragraph("The run was started by"), make_code(facts.command)]
    if lines:
        parts += [make_paragraph("To repeat it from what this page holds:"), make_code("\n".join(lines))]
    seed = facts.find_setting(facts.section or "", "seed")
    facts_of_it = [f"seed {seed}"] if seed is not None else []
    facts_of_it.append(
        "A synchronous run in one process repeats to the last digit on the same packages and hardware; others as far as "
        "docs/reliability.md says."
    )
    return "".join(parts) + make_list(facts_of_it)
