"""What a run's rates are divided by: its devices, its model's arithmetic, and the peak of a device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from strop.config import TrainingRunConfig
from strop.config.checks.device_counts import count_devices
from strop.hardware.devices import find_device
from strop.hardware.model_dimensions import DecoderDimensions, UnknownDimensions, dimensions_of
from strop.learner.throughput import Throughput
from strop.models.loading import read_model_config

logger = logging.getLogger(__name__)


def make_throughput(config: TrainingRunConfig, gpu_names: Sequence[str]) -> Throughput:
    """Return the throughput of a run on GPUs that NVML calls so; without any, on processors, whose peak is not known."""
    counts, policy = count_devices(config), config.policy
    training = counts.learner_devices
    generating = 0 if counts.colocated or not counts.uses_ray else counts.generating_nodes * counts.generating_per_node
    on_gpu = policy.device != "cpu" and bool(gpu_names)
    adapters = policy.megatron_cfg.peft if policy.megatron_cfg.enabled else policy.dtensor_cfg.lora_cfg
    return Throughput(
        devices=training + generating,
        training_devices=training,
        model=_read_dimensions(policy.model_name),
        peak_flops=_find_peak(gpu_names[0], "fp8" if policy.fp8.enabled else policy.precision) if on_gpu else None,
        frozen=adapters.enabled,
    )


def _read_dimensions(name: str) -> DecoderDimensions | None:
    try:
        return dimensions_of(read_model_config(name).to_dict())
    except UnknownDimensions as error:
        logger.info("perf/mfu and perf/model_tflops_per_gpu are not logged: %s", error)
    except Exception as error:  # the driver of a cluster may lack the model's files
        logger.info("perf/mfu and perf/model_tflops_per_gpu are not logged: %s cannot be read here: %s", name, error)
    return None


def _find_peak(gpu: str, precision: str) -> float | None:
    device = find_device(gpu)
    if device is None:
        logger.info("perf/mfu is not logged: the peak rate of %s is not in the table of devices", gpu)
        return None
    try:
        return device.peak_flops(precision)
    except ValueError:
        return device.peak_flops("bfloat16")  # FP8 weights on a device without such arithmetic
