"""What a configuration names of this machine: the device of this process, and the folders that a run writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from strop import gpus
from strop.config import TrainingRunConfig
from strop.gpus import describe_visible, has_gpu, visible_gpus
from strop.problems import Problem
from strop.storage.folder_lock import find_folder_problem


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


LOG_DIR, CHECKPOINT_DIR = "logger.log_dir", "checkpointing.checkpoint_dir"


def list_folders(config: TrainingRunConfig) -> dict[str, Path]:
    """Return the folders that a run writes, by key."""
    folders = {LOG_DIR: Path(config.logger.log_dir).absolute()}
    if config.checkpointing.saving_enabled:
        folders[CHECKPOINT_DIR] = Path(config.checkpointing.checkpoint_dir).absolute()
    generation = getattr(config.policy, "generation", None)
    weights = getattr(generation, "weight_sync", None)
    if weights is not None and weights.folder is not None:
        folders["policy.generation.weight_sync.folder"] = Path(weights.folder).absolute()
    return folders


def find_folder_problems(config: TrainingRunConfig) -> Iterator[Problem]:
    """Yield a problem for each key whose folder can neither be written nor created."""
    for key, folder in list_folders(config).items():
        if problem := find_folder_problem(folder):
            yield Problem(key, problem)
