"""The peak of this machine's processors, measured in about a second and cached for further runs.

The fastest of several calls is used, because other work on the machine only slows calls down. The cache key includes all
influences: processor, usable cores, threads, torch's version.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from strop.monitoring.run_starts import find_processor
from strop.storage.atomic_file import atomic_write
from strop.storage.user_cache import user_cache_folder

FORMATS = ("bfloat16", "float32")
SECONDS = 0.08  # of each measurement in a round
ROUNDS = 6  # maximum; two are enough if they agree
AGREE = 0.06  # largest difference between the two best rounds of each measurement
SIDES = (512, 1024)  # sides of square matrices; the fastest counts
LONGEST = 0.25  # seconds: larger matrices are skipped if one product would take longer


@dataclass(frozen=True, kw_only=True)
class MeasuredPeak:
    """The peak performance of processors."""

    device: str
    flops: Mapping[str, float]  # FLOPs per second, by number format
    source: str  # in words, with the day of the measurement

    def peak(self, precision: str) -> float:
        """Return FLOPs per second in a number format; for an unknown format the highest, so that utilisation is not overstated."""
        return self.flops.get(precision) or max(self.flops.values())


def measure_peak(threads: int | None = None) -> MeasuredPeak:
    """Return the peak of this machine's processors with this many threads; None: torch's own number.

    Measured once, for about a second, and stored in Strop's cache folder, unless the machine was too busy for consistent results.
    Concurrent processes measure one after another.
    """
    threads = threads or torch.get_num_threads()
    name = f"{find_processor()}, {threads} thread{'s' if threads > 1 else ''}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    identity = (name, cores, platform.machine(), str(torch.__version__), 1)
    path = user_cache_folder() / f"peak-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.json"
    with _locked(path.with_suffix(".lock")):
        known = _read(path)
        if known is not None:
            return known
        found, agreed = _measure(name, threads)
        if agreed:
            with suppress(OSError), atomic_write(path) as temporary:  # otherwise it is measured again next time
                temporary.write_text(json.dumps(asdict(found), indent=1), encoding="utf-8")
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; without one if the folder is not writable or the system has no such locks."""
    try:
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = path.open("a")
    except (ImportError, OSError):
        yield
        return
    with file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> MeasuredPeak | None:
    """Return the cached value; None if it is missing or damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        flops = {name: float(values["flops"][name]) for name in FORMATS}
        found = MeasuredPeak(device=str(values["device"]), flops=flops, source=str(values["source"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if all(0 < rate < 1e30 for rate in flops.values()) else None


def _measure(name: str, threads: int) -> tuple[MeasuredPeak, bool]:
    """Return the peak, and whether the rounds agreed, which they may not on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            rates, spread = _measure_rounds({each: partial(_measure_products, getattr(torch, each)) for each in FORMATS})
    finally:
        torch.set_num_threads(before)
    agreed = spread < AGREE
    busy = "" if agreed else f", while it was busy: rounds differed by {100 * spread:.0f} %"
    source = f"measured on this machine on {time.strftime('%Y-%m-%d')}{busy}"
    return MeasuredPeak(device=name, flops=rates, source=source), agreed


def _measure_rounds(measurements: Mapping[str, Callable[[], float]]) -> tuple[dict[str, float], float]:
    """Return the best rate of each measurement, and the largest relative difference between its best two rounds."""
    rates: dict[str, list[float]] = {each: [] for each in measurements}
    spread = 1.0
    for number in range(ROUNDS):
        for each, measure in measurements.items():
            rates[each] = sorted((*rates[each], measure()), reverse=True)
        spread = max(1 - found[1] / found[0] for found in rates.values()) if number else 1.0
        if spread < AGREE:
            break
    return {each: found[0] for each, found in rates.items()}, spread


def _measure_products(dtype: torch.dtype) -> float:
    """Return the FLOPs per second of square products."""
    best = 0.0
    for side in SIDES:
        left, right = (torch.ones(side, side, dtype=dtype) for _ in range(2))
        seconds = _time(lambda left=left, right=right: left @ right, SECONDS / len(SIDES))  # type: ignore[misc]
        best = max(best, 2.0 * side**3 / seconds)
        if 8 * seconds > LONGEST:
            break
    return best


def _time(work: Callable[[], object], budget: float) -> float:
    """Return the seconds of the fastest of several calls."""
    work()
    best, end = float("inf"), time.perf_counter() + budget
    while best == float("inf") or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best
