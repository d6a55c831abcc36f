"""What each sample of a step waited for, and when: kept from the waits of a run, and written as a line a step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from strop.config import RolloutRunConfig
from strop.extensions.watch.timeline_file import TIMELINE_FILE, append_line, cut_timeline
from strop.monitoring.trackers.base import Tracker
from strop.monitoring.waits import LOOP, wait_listeners, waiting
from strop.runs.monitors.run_listeners import RunSetup
from strop.trainer.listeners import RunListener, StepView

SHORTEST = 0.0005  # seconds: what is shorter is not kept
MAX_SAMPLES, MAX_SPANS = 256, 8_000  # of a line: 8,000 spans are 200 KB
MAX_KEPT = 200_000  # spans in memory, about 40 MB: of groups in flight, and of those that a step has not taken yet
MAX_SYNCS = 64  # of a step
EVERY_SAMPLE = -1  # group rewards


class SampleSpan(NamedTuple):
    """A wait of a sample. Times are seconds of ``time.monotonic``."""

    began: float
    ended: float
    label: str  # its kind, then what tells it from others: "engine 2", "environment opening"


@dataclass(eq=False)
class GroupWaits:
    """The waits of a group's samples."""

    index: int
    began: float
    ended: float | None = None
    spans: list[tuple[int, SampleSpan]] = field(default_factory=list)  # with the sample

    def tile(self) -> dict[int, list[SampleSpan]]:
        """Return the spans of each sample, which do not overlap."""
        shared = [span for sample, span in self.spans if sample == EVERY_SAMPLE]
        found: dict[int, list[SampleSpan]] = {}
        for sample, span in sorted(self.spans):
            if sample != EVERY_SAMPLE:
                found.setdefault(sample, list(shared)).append(span)
        return {sample: tile(sorted(spans)) for sample, spans in found.items()}


def tile(spans: list[SampleSpan]) -> list[SampleSpan]:
    """Cut sorted spans so that they do not overlap: at each moment, the one that began last is kept."""
    if all(span.ended <= after.began for span, after in pairwise(spans)):
        return spans
    tiles: list[SampleSpan] = []
    open_spans: list[SampleSpan] = []
    at = 0.0
    for span in [*spans, SampleSpan(float("inf"), float("inf"), "")]:
        while open_spans and at < span.began:
            top = open_spans[-1]
            if (end := min(top.ended, span.began)) > at:
                tiles.append(SampleSpan(at, end, top.label))
                at = end
            if top.ended <= at:
                open_spans.pop()
        at = span.began
        open_spans.append(span)
    return tiles


class SampleTimeline(RunListener):
    """Writes ``timeline.jsonl``."""

    name = "timeline"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._groups: dict[int, GroupWaits] = {}  # by the number of the group's wait: validation has the same indices
        self._phases: list[tuple[str, float, float]] = []
        self._syncs: list[tuple[str, float, float]] = []
        self._kept = self._lost = 0

    async def on_start(self, step: int, tracker: Tracker) -> None:
        cut_timeline(self.path, step)
        wait_listeners.append(self.hear)

    async def on_end(self) -> None:
        if self.hear in wait_listeners:
            wait_listeners.remove(self.hear)

    def hear(self, wait: waiting) -> None:
        """Take in a wait that has just ended, in its thread."""
        ended, who = time.monotonic(), wait.who
        if who == LOOP:
            self._phases.append((wait.on, wait.since, ended))
        elif ended - wait.since < SHORTEST:
            return
        elif who.startswith("sample ") and who[7:].isdecimal():
            self._add(wait, int(who[7:]), SampleSpan(wait.since, ended, _label(wait.kind, wait.on)))
        elif who == "generation":
            if (group := self._find(wait)) is not None:
                group.ended = ended
        elif who.startswith("group of task "):
            self._add(wait, EVERY_SAMPLE, SampleSpan(wait.since, ended, "rewards of the group"))
        elif who == "weight sync" and len(self._syncs) < MAX_SYNCS:
            self._syncs.append((wait.on, wait.since, ended))

    def _add(self, wait: waiting, sample: int, span: SampleSpan) -> None:
        if self._kept >= MAX_KEPT:
            self._lost += 1
        elif (group := self._find(wait)) is not None:
            group.spans.append((sample, span))
            self._kept += 1

    def _find(self, wait: waiting) -> GroupWaits | None:
        """Return the group around a wait; None outside of training."""
        at: waiting | None = wait
        while at is not None and at.who != "generation":
            at = at.parent
        if at is None or (at.parent is not None and at.parent.on == "validation"):
            return None
        if at.number not in self._groups:
            self._groups[at.number] = GroupWaits(int(at.on[6:]), at.since)
        return self._groups[at.number]

    async def on_log(self, step: StepView) -> dict[str, float]:
        began = time.monotonic() - (time.perf_counter() - step.timer.started)
        now = began + step.timer.ended - step.timer.started
        self._phases = [phase for phase in self._phases if phase[2] > began]  # not the validation before the first step
        kept = {group.index: True for group in step.groups} | {group.index: False for group, _ in step.dropped}
        taken = [group for number in list(self._groups) if (group := self._take(number, kept)) is not None]
        try:
            write = partial(self._write, step.step, began, now, taken, kept)
            if sum(len(group.spans) for group in taken) > MAX_SPANS:  # then it takes 0.1 s and more
                await asyncio.to_thread(write)
            else:
                write()
        except OSError:
            await self.on_end()  # it is detached
            raise
        self._phases, self._syncs, self._lost = [], [], 0
        while self._kept >= MAX_KEPT and self._groups:  # of groups that no step takes
            self._kept -= len(self._groups.pop(next(iter(self._groups))).spans)
        return {}

    def _take(self, number: int, wanted: dict[int, bool]) -> GroupWaits | None:
        group = self._groups[number]
        if group.ended is None or group.index not in wanted:
            return None
        self._kept -= len(group.spans)
        return self._groups.pop(number)

    def _write(self, *described: Any) -> None:
        append_line(self.path, self._describe(*described))

    def _describe(self, step: int, began: float, now: float, groups: list[GroupWaits], kept: dict[int, bool]) -> dict[str, Any]:
        def place(moment: float) -> int:
            return round(1000 * (moment - began))

        def list_named(spans: Sequence[tuple[str, float, float]]) -> list[list[Any]]:
            placed = ((name, place(start), place(end)) for name, start, end in spans)
            return [[name, start, end] for name, start, end in placed if start < end]

        collected = max((end for phase, _, end in self._phases if phase == "generation"), default=now)
        tiled = [(group, group.tile()) for group in groups]
        ends = {(group.index, sample): spans[-1].ended for group, samples in tiled for sample, spans in samples.items()}
        last = max(ends, key=ends.__getitem__, default=None)
        tiled.sort(key=lambda each: last is None or each[0].index != last[0])  # the group of the last sample first
        shown = take_shown(tiled)
        listed = [
            {
                "group": group.index, "kept": kept[group.index], "from": place(group.began), "to": place(group.ended or now),
                "samples": {sample: list_named([(label, start, end) for start, end, label in spans]) for sample, spans in rows},
            }
            for group, rows in shown
        ]  # fmt: skip
        return {
            "step": step, "began": time.time() - (time.monotonic() - began), "seconds": now - began, "phases": list_named(self._phases),
            "syncs": list_named(self._syncs), "groups": listed, "more": len(ends) - sum(len(rows) for _, rows in shown),
            "lost": self._lost, "collected": place(collected), "seconds_of": sum_seconds(tiled, collected),
            "last": None if last is None else [*last, place(ends[last])],
            "median": None if last is None else place(median(ends.values())),
        }  # fmt: skip


@lru_cache(maxsize=4096)
def _label(kind: str, on: str) -> str:
    """Return "engine 2" for a second turn, "engine request 2", "tools 1", "rewards", "environment 1", "environment opening"."""
    what = on.rpartition(", ")[2]  # "turn 2", "tools of turn 1", "opening its session", "its agent"
    if what == "rewards":
        return what
    if what.startswith("tools of turn "):
        return f"tools {what[14:]}"
    what = what.removeprefix("turn ").removeprefix("its ").removesuffix(" its session")
    return f"{'engine' if kind == 'generation' else 'environment'} {what}"


def take_shown(
    tiled: Sequence[tuple[GroupWaits, dict[int, list[SampleSpan]]]],
) -> list[tuple[GroupWaits, list[tuple[int, list[SampleSpan]]]]]:
    """Return the groups, in this order, with the samples that a line has room for."""
    samples, spans, found = MAX_SAMPLES, MAX_SPANS, []
    for group, rows in tiled:
        shown = []
        for sample, row in rows.items():
            if samples > 0 and len(row) <= spans:
                samples, spans = samples - 1, spans - len(row)
                shown.append((sample, row))
        if shown:
            found.append((group, shown))
    return found


def sum_seconds(tiled: Sequence[tuple[GroupWaits, dict[int, list[SampleSpan]]]], collected: float) -> dict[str, float]:
    """Return the seconds of all samples by kind, and those that they waited from the start of their group to their end and, as
    ``ended``, from then until the step was collected."""
    seconds = {"engine": 0.0, "environment": 0.0, "tools": 0.0, "rewards": 0.0, "waiting": 0.0, "ended": 0.0}
    for group, samples in tiled:
        for spans in samples.values():
            at = group.began
            for start, end, label in spans:
                seconds[label.partition(" ")[0]] += end - start
                seconds["waiting"] += max(start - at, 0.0)
                at = end
            seconds["ended"] += max(collected - at, 0.0)
    return {kind: round(value, 4) for kind, value in seconds.items()}


def make_timeline(setup: RunSetup) -> SampleTimeline | None:
    """The entry point of ``strop.listeners``; None for recorded data, which waits for nothing."""
    if not isinstance(setup.config, RolloutRunConfig):
        return None
    return SampleTimeline(Path(setup.config.logger.log_dir) / TIMELINE_FILE)
