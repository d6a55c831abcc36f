"""Torch's operators, and kernels on a GPU, of this process while a step is recorded."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

MARK = "strop clock"  # a range whose beginning is known on our clock, by which torch's times are aligned


class OperatorTrace:
    """Records torch's operators of all threads. ``end`` must follow ``begin``, in the same thread."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._marked = 0.0

    def begin(self) -> None:
        """Begin to record. Raises RuntimeError if another profiler of this process does already."""
        import torch
        from torch._C._profiler import _ExperimentalConfig

        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        settings = _ExperimentalConfig(profile_all_threads=True, trace_only=True)
        profile = torch.profiler.profile(activities=kinds, experimental_config=settings)
        profile.start()
        self._marked = time.perf_counter()
        with torch.profiler.record_function(MARK):
            pass
        self._profile = profile

    def end(self) -> str | None:
        """End the recording. Return its events as JSON, with times in microseconds of this process's ``perf_counter``; None without one."""
        if self._profile is None:
            return None
        profile, self._profile = self._profile, None
        profile.stop()
        handle, name = tempfile.mkstemp(suffix=".json")
        os.close(handle)
        try:
            profile.export_chrome_trace(name)
            return json.dumps(align_events(json.loads(Path(name).read_text(encoding="utf-8", errors="replace")), self._marked))
        finally:
            Path(name).unlink(missing_ok=True)


def align_events(trace: dict[str, Any], marked: float) -> list[dict[str, Any]]:
    """Return the events that take time, with ``ts`` moved so that the mark began at ``marked`` (seconds)."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event and "ts" in event]
    marks = [event["ts"] for event in events if event.get("name") == MARK]
    shift = marked * 1e6 - min(marks) if marks else 0.0
    kept = ("name", "cat", "ts", "dur", "pid", "tid")
    return [
        {**{key: event[key] for key in kept if key in event}, "ts": event["ts"] + shift}
        for event in events
        if event.get("name") != MARK and event.get("cat") not in ("Trace", "overhead")
    ]
