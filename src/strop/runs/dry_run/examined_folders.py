"""Checks that the folders named by a configuration are writable. Nothing is left in them: a dry run creates no run folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from strop.config import TrainingRunConfig
from strop.problems import Problem
from strop.storage.folder_probe import find_folder_problem

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
