"""Inputs of a run's throughput rates: its devices, its model's arithmetic, and the peak of a device."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strop.config import TrainingRunConfig
from strop.config.checks.device_counts import count_devices
from strop.distributed.placement import DeviceCounts
from strop.hardware import DecoderDimensions, find_device
from strop.learner.throughput import Throughput
from strop.models.decoder_dimensions import UnknownDimensions, dimensions_of
from strop.models.loading import read_model_config
from strop.runs.monitors.measured_peak import measure_peak

logger = logging.getLogger(__name__)


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
