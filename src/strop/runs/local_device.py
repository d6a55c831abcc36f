"""Resolve the configured device of this process."""

from __future__ import annotations

import os
import sys

from strop import gpus
from strop.gpus import describe_visible, has_gpu, visible_gpus


def resolve_device_name(device: str) -> str:
    """Return cpu, cuda or cuda:N; "auto" is a GPU if there is one. Raises ValueError if a requested GPU is missing."""
    if device == "auto":
        return gpus.KIND if has_gpu() else "cpu"
    if device.startswith("cuda") and not has_gpu():
        raise ValueError(f"policy.device is {device}, and torch finds no GPU here; set policy.device=cpu or auto")
    _, _, index = device.partition(":")
    if index and int(index) >= (count := len(visible_gpus())):
        numbers = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise ValueError(
            f"policy.device is {device}, and this process sees {describe_visible()}, which torch counts from 0; set policy.device to "
            f"{numbers}"
        )
    return device


def count_threads(configured: int | None) -> int | None:
    """Return torch's number of CPU threads; None if it is known only after importing torch."""
    if configured is not None:
        return configured
    if "torch" in sys.modules:
        import torch

        return torch.get_num_threads()
    requested = os.environ.get("OMP_NUM_THREADS", "")
    return int(requested) if requested.isdigit() and int(requested) > 0 else None
