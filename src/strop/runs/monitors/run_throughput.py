"""Inputs of a run's throughput rates: its devices, its model's arithmetic, and the peak of a device, measured for processors."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from strop.config import TrainingRunConfig
from strop.config.cluster_checks import count_devices
from strop.distributed.placement import DeviceCounts
from strop.hardware import DecoderDimensions, find_device
from strop.learner.throughput import Throughput
from strop.models.decoder_dimensions import UnknownDimensions, dimensions_of
from strop.models.loading import read_model_config
from strop.monitoring.run_starts import find_processor
from strop.storage.files import atomic_write, user_cache_folder

logger = logging.getLogger(__name__)

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
        found, agreed = _measure_peak(name, threads)
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


def _measure_peak(name: str, threads: int) -> tuple[MeasuredPeak, bool]:
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


@dataclass(frozen=True)
class DevicePeak:
    """The peak of one training device, and its source."""

    flops: float  # a second
    source: str


def make_throughput(
    config: TrainingRunConfig, gpu_names: Sequence[str], note: Callable[[str], object], *, on_cpu: bool
) -> Throughput:
    """Return the throughput of a run on processors, or on GPUs with these NVML names; empty names: unknown.

    ``note`` receives the peak that ``perf/mfu`` refers to.
    """
    counts, policy = count_devices(config), config.policy
    training = counts.learner_devices
    generating = 0 if counts.colocated or not counts.uses_ray else counts.generating_nodes * counts.generating_per_node
    model = read_dimensions(policy.model_name)
    peak = None if model is None else find_peak(config, gpu_names, counts, on_cpu=on_cpu)
    if peak is not None:
        each = f"each of {training} devices that train" if training > 1 else "the device that trains"
        note(f"perf/mfu: of {peak.flops / 1e12:.4g} TFLOP/s in {_precision(config)}, the peak of {each} ({peak.source})")
    return Throughput(
        devices=training + generating,
        training_devices=training,
        model=model,
        peak_flops=None if peak is None else peak.flops,
        frozen=policy.adapter_rank is not None,
    )


def read_dimensions(name: str) -> DecoderDimensions | None:
    """Return the dimensions of a model; None, with a log message, if its layers are unknown or it cannot be read."""
    try:
        return dimensions_of(read_model_config(name).to_dict())
    except UnknownDimensions as error:
        logger.info("perf/mfu and perf/model_tflops_per_gpu are not logged: %s", error)
    except Exception as error:  # the driver of a cluster may lack the model's files
        logger.info("perf/mfu and perf/model_tflops_per_gpu are not logged: %s cannot be read here: %s", name, error)
    return None


def find_peak(config: TrainingRunConfig, gpu_names: Sequence[str], counts: DeviceCounts, *, on_cpu: bool) -> DevicePeak | None:
    """Return the peak of one training device: the user's value, the table's, or a measurement of this machine's processors if
    requested.
    """
    asked = config.logger.peak_tflops
    if asked is not None and asked != "measure":
        return DevicePeak(asked * 1e12, "logger.peak_tflops")
    if not on_cpu:
        return _find_in_table(gpu_names[0] if gpu_names else "a GPU whose name is not known", _precision(config))
    if asked is None:
        logger.info("perf/mfu is not logged: the peak of processors is not known; logger.peak_tflops=measure measures it")
        return None
    ranks = counts.learner_devices if counts.uses_ray else 1
    return _measure(config.policy.num_threads, min(ranks, counts.per_node), config.policy.precision)


def _precision(config: TrainingRunConfig) -> str:
    return "fp8" if config.policy.fp8.enabled else config.policy.precision


def _find_in_table(gpu: str, precision: str) -> DevicePeak | None:
    device = find_device(gpu)
    if device is None:
        logger.info("perf/mfu is not logged: the peak rate of %s is not in the device table", gpu)
        return None
    try:
        return DevicePeak(device.peak_flops(precision), f"{device.name}, from the table of devices")
    except ValueError:  # FP8 weights on a device without FP8 arithmetic
        return DevicePeak(device.peak_flops("bfloat16"), f"{device.name}, from the table of devices, in bfloat16")


def _measure(threads: int | None, ranks: int, precision: str) -> DevicePeak:
    """Return the peak of one of ``ranks`` processes on a machine: at most its share of the cores, so that the sum is achievable."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if ranks > 1 or threads is not None:
        own = max(1, cores // ranks)
        threads = min(threads or own, own)
    measured = measure_peak(threads)
    share = min(1.0, cores / ranks)
    shared = f", shared by {ranks} ranks" if share < 1 else ""
    return DevicePeak(share * measured.peak(precision), f"{measured.device}{shared}, {measured.source}")
