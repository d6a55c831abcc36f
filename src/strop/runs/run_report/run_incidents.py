"""What went wrong in a run, or was changed: restarts, errors, warnings, dropped groups, alarms. From its files alone."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from strop.monitoring.config_history import HISTORY_FILE
from strop.monitoring.run_lines import Steps
from strop.monitoring.run_starts import RunStart
from strop.monitoring.watchdog.doctor import describe_dropped_groups, find_verdict
from strop.monitoring.watchdog.status import Status

# Metrics that count what should not happen.
COUNTS = {
    "train/groups_dropped_for_errors": "groups dropped, because a rollout failed",
    "train/groups_dropped_stale": "groups dropped, because they were too old",
    "train/groups_dropped_by_filter": "groups dropped by the algorithm's filter",
    "train/steps_skipped_for_nonfinite_gradient": "optimizer steps skipped, because the gradient was not finite",
    "train/checkpoint_failed": "steps whose checkpoint the file system refused",
    "generation/restarts": "restarts of engines",
}
TOTALS = ("generation/restarts",)  # logged as a total so far
MOST_NAMED = 12  # steps


@dataclass(frozen=True)
class Incident:
    """Something that happened to a run."""

    kind: str  # restart, change, error, warning, dropped, alarm, ...
    when: str  # a time, a step or several; empty if unknown
    text: str


def list_incidents(folder: Path, steps: Steps, status: Status | None, starts: Sequence[RunStart]) -> list[Incident]:
    """Return the incidents of a run, those that ended it first."""
    return [
        *_list_endings(status),
        *_list_starts(starts),
        *_list_changes(folder),
        *_list_notes(status),
        *_list_counts(steps),
        *_list_failures(folder, steps),
        *_list_flags(steps),
    ]


def _list_endings(status: Status | None) -> Iterator[Incident]:
    if status is None:
        return
    verdict, why = find_verdict(status)
    if verdict not in ("running", "finished"):
        yield Incident(verdict, _format_time(status.written), why)
    if status.stacks is not None:
        yield Incident("stall", "", f"the stacks of all threads were written: {Path(status.stacks).name}")


def _list_starts(starts: Sequence[RunStart]) -> Iterator[Incident]:
    for before, start in pairwise(starts):
        changed = [f"{name} {old} -> {new}" for name, old, new in _differ(before.versions, start.versions)]
        changed += [f"{name}: {old} -> {new}" for name, old, new in _differ(before.hardware, start.hardware)]
        changed += [f"contents changed, {name}: {old} -> {new}" for name, old, new in _differ(before.data, start.data)]
        yield Incident(
            "restart", start.time, f"continued after step {start.after_step}" + "".join(f"; {each}" for each in changed)
        )


def _differ(old: Mapping[str, str], new: Mapping[str, str]) -> list[tuple[str, str, str]]:
    names = dict.fromkeys([*old, *new])
    return [(name, old.get(name, "none"), new.get(name, "none")) for name in names if old.get(name) != new.get(name)]


def _list_changes(folder: Path) -> Iterator[Incident]:
    for line in _read_history(folder):
        changed = line.get("changed")
        if isinstance(changed, Mapping) and changed:
            listed = ", ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in changed.items())
            yield Incident("settings", f"from step {line.get('from_step', '?')}", listed)


def _read_history(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in (folder / HISTORY_FILE).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []
    return [line for line in lines if isinstance(line, dict)]


def _list_notes(status: Status | None) -> Iterator[Incident]:
    if status is None:
        return
    for note in status.notes:
        kind, colon, text = note.text.partition(": ")
        if colon and kind.startswith("warning"):
            yield Incident(kind, _format_time(note.when), text)
    for report in status.reports:
        yield Incident("watchdog", _format_time(report.when), report.text)


def _list_counts(steps: Steps) -> Iterator[Incident]:
    for tag, meaning in COUNTS.items():
        logged = [(step, values.get(tag, 0.0)) for step, values in steps]
        if tag in TOTALS:
            logged = [
                (step, max(value - before, 0.0)) for (step, value), (_, before) in zip(logged, [(0, 0.0), *logged], strict=False)
            ]
        found = [(step, value) for step, value in logged if value > 0 and math.isfinite(value)]
        if found:
            yield Incident("count", _name_steps([step for step, _ in found]), f"{sum(value for _, value in found):g} {meaning}")


def _list_failures(folder: Path, steps: Steps) -> Iterator[Incident]:
    try:
        lines = describe_dropped_groups(folder, steps)
    except (OSError, ValueError, ImportError):  # rollouts that cannot be read
        return
    if lines:
        yield Incident("errors", "", "\n".join(line.strip() for line in lines))


def _list_flags(steps: Steps) -> Iterator[Incident]:
    tags = sorted({tag for _, values in steps for tag in values if tag.startswith(("health/", "monitor/"))})
    for tag in tags:
        held = [step for step, values in steps if values.get(tag) == 1]
        if held and tag.startswith("health/"):
            yield Incident("health", _name_steps(held), f"{tag.removeprefix('health/')} (docs/troubleshooting.md)")
        elif held and tag.endswith("_alarm"):
            yield Incident(
                "alarm", f"from step {held[0]}", f"reward hacking: {tag.removeprefix('monitor/').removesuffix('_alarm')}"
            )


def _name_steps(steps: Sequence[int]) -> str:
    """Return steps as ranges: 3, 7 to 12, 40."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    named = [f"{first}" if first == last else f"{first} to {last}" for first, last in ranges]
    more = "" if len(named) <= MOST_NAMED else f", and {len(named) - MOST_NAMED} more"
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(named[:MOST_NAMED])}{more}"


def _format_time(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
