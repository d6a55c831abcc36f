"""The peak of this machine's processors: measured in about a second, and remembered for further runs.

The fastest of several calls counts, as others' work on the machine only ever makes one slower. Remembered under what the figures depend on:
processor, cores that this process may use, threads, torch's version.
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
ROUNDS = 6  # at most; two are enough where they agree
AGREE = 0.06  # the two best rounds of each figure differ by less
SIDES = (512, 1024)  # of square matrices; the fastest counts
LONGEST = 0.25  # seconds: no larger matrices where one product would take longer


@dataclass(frozen=True, kw_only=True)
class MeasuredPeak:
    """What processors do at most."""

    device: str
    flops: Mapping[str, float]  # FLOPs a second, by number format
    source: str  # in words: measured on which day

    def peak(self, precision: str) -> float:
        """Return FLOPs a second in a number format; of one that is not known the highest, so that no share is flattered."""
        return self.flops.get(precision) or max(self.flops.values())


def measure_peak(threads: int | None = None) -> MeasuredPeak:
    """Return the peak of this machine's processors with so many threads; None: torch's own number.

    Measured once, about a second, and kept in Strop's cache folder, but for figures of a machine that was too busy to agree with itself.
    Processes that ask at the same time measure one after another.
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
            with suppress(OSError), atomic_write(path) as temporary:  # or measured again the next time
                temporary.write_text(json.dumps(asdict(found), indent=1), encoding="utf-8")
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; without one where the folder cannot be written or the system has no such locks."""
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
    """Return what is remembered; None if it is not there or damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        flops = {name: float(values["flops"][name]) for name in FORMATS}
        found = MeasuredPeak(device=str(values["device"]), flops=flops, source=str(values["source"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if all(0 < rate < 1e30 for rate in flops.values()) else None


def _measure(name: str, threads: int) -> tuple[MeasuredPeak, bool]:
    """Return the peak, and whether rounds agreed: on a machine that others keep busy they may not."""
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
    """Return the best rate of each measurement, and by what share the best two rounds of any of them differ."""
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
    """Return the FLOPs a second of square products."""
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
