"""The most memory that torch's allocator holds at once during some work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from strop.monitoring.profiling.quiet_profiler import quiet_profiler


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
    with quiet_profiler(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    events: Any = profile.kineto_results
    held = peak = 0
    for event in sorted((each for each in events.events() if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
