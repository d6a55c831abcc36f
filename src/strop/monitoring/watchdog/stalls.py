"""Find stalls: the innermost waits over their limits, by kind, and the task that blocks the event loop. Format them for the user."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strop.base_config import fields_of
from strop.monitoring.watchdog.waits import Wait, describe_wait
from strop.monitoring.watchdog.watchdog_config import WatchdogConfig

MAX_WAITS_REPORTED = 5  # in one report


@dataclass(frozen=True)
class Stall:
    """Waits of one kind that exceed their limit, the longest first."""

    kind: str
    limit: float
    waits: tuple[Wait, ...]
    loop_blocked: float | None = None  # seconds for which the event loop has been blocked in the last of them

    @property
    def seconds(self) -> float:
        return max([self.loop_blocked or 0.0, *(wait.seconds for wait in self.waits)])


def find_stalls(
    waits: Sequence[Wait], limits: WatchdogConfig, *, loop_thread: int, loop_blocked: float | None = None
) -> list[Stall]:
    """Return the waits over their limits.

    ``loop_blocked``: seconds for which the event loop, in ``loop_thread``, has been blocked; None: it runs.

    While it is blocked, report only the task that holds it, because other tasks' waits may already be done.
    """
    candidates = waits if loop_blocked is None else [wait for wait in waits if wait.thread != loop_thread]
    by_kind: dict[str, list[Wait]] = {}
    for wait in _innermost_overdue(candidates, waits):
        by_kind.setdefault(wait.kind or wait.on, []).append(wait)
    stalls = [
        Stall(kind, min(wait.limit or 0.0 for wait in group), tuple(sorted(group, key=lambda wait: -wait.seconds)))
        for kind, group in by_kind.items()
    ]
    return stalls if loop_blocked is None else [*stalls, *_find_loop_stall(waits, limits, loop_blocked)]


def _find_loop_stall(waits: Sequence[Wait], limits: WatchdogConfig, loop_blocked: float) -> list[Stall]:
    running = [wait for wait in waits if wait.running]
    limited = [wait for wait in running if wait.limit is not None]
    if limited:
        wait = limited[-1]
        return [Stall(wait.kind or wait.on, wait.limit or 0.0, (wait,), loop_blocked)] if wait.overdue else []
    return (
        [Stall("event_loop", limits.event_loop_seconds, tuple(running[-1:]), loop_blocked)]
        if 0 < limits.event_loop_seconds < loop_blocked
        else []
    )


def _innermost_overdue(candidates: Iterable[Wait], waits: Sequence[Wait]) -> list[Wait]:
    """Return the waits over their limits, except those that only wait for another such wait."""
    by_number = {wait.number: wait for wait in waits}
    overdue = [wait for wait in candidates if wait.overdue]
    outer: set[int] = set()
    for wait in overdue:
        parent = wait.parent
        while parent is not None and parent in by_number and parent not in outer:
            outer.add(parent)
            parent = by_number[parent].parent
    return [wait for wait in overdue if wait.number not in outer]


def format_report(stall: Stall, waits: Sequence[Wait], step: int) -> str:
    """Format a stall for the user; the first line has the longest wait."""
    key = f" (watchdog.{stall.kind}_seconds)" if f"{stall.kind}_seconds" in fields_of(WatchdogConfig) else ""
    prefix = f"step {step} has waited longer than the limit of {stall.limit:g} s{key}: "
    chains = [
        f"{describe_wait(find_deepest_wait(wait, waits), waits)}, for {wait.seconds:.1f} s"
        for wait in stall.waits[:MAX_WAITS_REPORTED]
    ]
    lines = [prefix + (chains[0] if chains else "the event loop"), *(f"  also {chain}" for chain in chains[1:])]
    if stall.loop_blocked is not None:
        lines[0] += f"; this has blocked the event loop for {stall.loop_blocked:.1f} s, and nothing else runs"
    if (more := len(stall.waits) - MAX_WAITS_REPORTED) > 0:
        lines.append(f"  and {more} more")
    return "\n".join(lines)


def find_deepest_wait(wait: Wait, waits: Sequence[Wait]) -> Wait:
    """Follow the oldest child of each wait down to the innermost one."""
    children: dict[int, Wait] = {}
    for other in waits:
        if other.parent is not None:
            children.setdefault(other.parent, other)
    seen = {wait.number}
    while (child := children.get(wait.number)) is not None and child.number not in seen:
        seen.add(child.number)
        wait = child
    return wait


def select_longest_waits(waits: Sequence[Wait], count: int) -> tuple[Wait, ...]:
    """Return the ``count`` longest innermost waits and their ancestors, in the order in which they began."""
    by_number = {wait.number: wait for wait in waits}
    parents = {wait.parent for wait in waits}
    selected: set[int] = set()
    for wait in sorted((wait for wait in waits if wait.number not in parents), key=lambda wait: -wait.seconds)[:count]:
        number: int | None = wait.number
        while number is not None and number in by_number and number not in selected:
            selected.add(number)
            number = by_number[number].parent
    return tuple(wait for wait in waits if wait.number in selected)
