"""The most memory that torch's allocator holds at once during some work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def measure_peak(work: Callable[[], object], device: torch.device) -> int:
    """Call ``work`` and return the most bytes it held at once beyond what was allocated before.

    On a CPU torch's profiler reports every allocation, so the number does not depend on what the process has freed before.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    with _quiet_profiler(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    events: Any = profile.kineto_results
    held = peak = 0
    for event in sorted((each for each in events.events() if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep the profiler's library from writing when it starts and stops."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ[name] = before or "6"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
