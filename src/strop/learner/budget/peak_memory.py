"""The peak memory of torch's allocator during some work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from strop.device_copies import is_gpu
from strop.monitoring.process_profile import quiet_profiler


def measure_peak(work: Callable[[], object], device: torch.device) -> int:
    """Call ``work`` and return the peak of its allocations in bytes, beyond what was allocated before.

    On a CPU torch's profiler reports every allocation, so the result does not depend on memory freed earlier.
    """
    if is_gpu(device):
        gpu = torch.get_device_module(device)
        gpu.synchronize(device)
        gpu.reset_peak_memory_stats(device)
        before = int(gpu.memory_allocated(device))
        work()
        gpu.synchronize(device)
        return int(gpu.max_memory_allocated(device)) - before
    with quiet_profiler(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    events: Any = profile.kineto_results
    held = peak = 0
    for event in sorted((each for each in events.events() if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
