"""The driver's side of a profile: starts and stops recording in every process of the run, and writes the trace of a step."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from strop.monitoring.profiling.clock_exchange import ClockOffset, exchange_clocks
from strop.monitoring.profiling.process_profile import begin_profile, end_profile
from strop.monitoring.profiling.trace_file import ProcessSpans, make_trace, write_trace

PROFILES_FOLDER = "profiles"
ANSWER_SECONDS = 20.0  # time limit for an answer of another process; without one, it is left out of the trace


class ProfiledProcess(Protocol):
    """Another process of the run."""

    name: str
    pid: int | None
    address: str

    def control_profile(self, what: str, operators: bool = False) -> Awaitable[Any]:
        """Call ``strop.monitoring.profiling.process_profile.control_profile`` there."""
        ...


@dataclass
class StepProfiler:
    """Profiles some steps of a run. A failed profile only causes a note and never ends the run."""

    folder: Path | None = None  # the run's log folder; None: nothing is profiled
    steps: frozenset[int] = frozenset()
    operators: bool = False
    note: Callable[[str], object] = lambda text: None
    processes: Callable[[], Sequence[ProfiledProcess]] = tuple
    _step: int | None = None
    _clocks: dict[str, ClockOffset] = field(default_factory=dict)
    _notes: dict[str, str] = field(default_factory=dict)

    async def begin(self, step: int) -> None:
        """Start recording if this step is to be profiled."""
        if step not in self.steps:
            return
        self._step, self._clocks, self._notes = step, {}, {}
        await asyncio.gather(*(self._begin_process(process) for process in self.processes()))
        if problem := begin_profile(self.operators):
            self._notes["driver"] = problem

    async def finish(self, step: int, began: float, ended: float) -> None:
        """Write the trace of the recorded step. ``began`` and ``ended`` are times of ``time.perf_counter``."""
        if step != self._step or self.folder is None:
            return
        self._step = None
        own = end_profile()
        started = time.perf_counter()
        note = self._notes.get("driver", "")
        driver = ProcessSpans(name="driver", pid=os.getpid(), spans=own.spans, lost=own.lost, operators=own.operators, note=note)
        others = await asyncio.gather(*(self._end_process(process) for process in self.processes()))
        path = self.folder / PROFILES_FOLDER / f"step_{step:06d}.json.gz"
        try:
            trace = make_trace(step, began, ended, [driver, *others])
            await asyncio.to_thread(write_trace, path, trace)
        except (OSError, ValueError) as error:
            self.note(f"warning: the profile of step {step} is not written: {error}")
            return
        worst = max((process.clock.error for process in others), default=0.0)
        clocks = f", clocks of {len(others)} other processes within {1e6 * worst:.0f} us" if others else ""
        seconds = time.perf_counter() - started
        self.note(
            f"profile of step {step}: {path} ({len(trace['traceEvents']):,} events{clocks}, written in {seconds:.1f} s); open it at "
            "ui.perfetto.dev"
        )

    def close(self) -> None:
        """Stop a recording whose step did not end."""
        if self._step is not None:
            self._step = None
            end_profile()

    async def _begin_process(self, process: ProfiledProcess) -> None:
        try:
            self._clocks[process.name] = await asyncio.wait_for(
                exchange_clocks(lambda: process.control_profile("clock")), ANSWER_SECONDS
            )
            problem = await asyncio.wait_for(_as_awaitable(process.control_profile("begin", self.operators)), ANSWER_SECONDS)
            if problem:
                self._notes[process.name] = problem
        except Exception as error:  # it died or is stuck, which is reported elsewhere
            self._notes[process.name] = f"not recorded: {type(error).__name__}: {error}"

    async def _end_process(self, process: ProfiledProcess) -> ProcessSpans:
        found = ProcessSpans(name=process.name, pid=process.pid, address=process.address, note=self._notes.get(process.name, ""))
        if process.name not in self._clocks:
            return replace(found, note=found.note or "not recorded: the process was started during the step")
        try:
            recorded = await asyncio.wait_for(_as_awaitable(process.control_profile("end")), ANSWER_SECONDS)
        except Exception as error:
            return replace(found, note=f"not recorded: {type(error).__name__}: {error}")
        return replace(
            found,
            spans=recorded.spans,
            clock=self._clocks[process.name],
            lost=recorded.lost,
            operators=recorded.operators,
        )


async def _as_awaitable(call: Awaitable[Any]) -> Any:
    return await call
