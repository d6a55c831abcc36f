"""The folders written by a run or an evaluation: locked and tested before models load, and checked for space for a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from strop.config import TrainingRunConfig
from strop.learner.client import InlineCaller, LearnerClient
from strop.learner.torch.learner import TorchLearner
from strop.monitoring.trackers.base import Tracker
from strop.runs.dry_run.examined_folders import CHECKPOINT_DIR, LOG_DIR, list_folders
from strop.runs.resume.resume_plan import ResumePlan, plan_resume
from strop.storage.folder_probe import check_entries, check_space, probe_folder
from strop.storage.locked_folders import lock_folders
from strop.storage.short_path import shorten_path
from strop.storage.storage_error import format_bytes, free_bytes

WRITTEN_IN_LOGS = ("rollouts", "validation", "engines", "workers", "wandb", "tensorboard")  # folders, where they exist
ADAM_STATES = 2  # float32 values per trained parameter


@contextmanager
def lock_run_folders(config: TrainingRunConfig) -> Iterator[ResumePlan]:
    """Lock the log and checkpoint folders of a run for the duration of the context, after testing every folder the run will
    write. Yield what the run will do with their contents.

    Raises FolderLocked if another run uses one of them, ResumeError if they hold a run that this one cannot continue, and StorageError if
    one cannot be written or a checkpoint has no room.
    """
    written = list_folders(config)
    logs = written[LOG_DIR]
    folders = {key: written[key] for key in (LOG_DIR, CHECKPOINT_DIR) if key in written}
    plans: list[ResumePlan] = []

    def check() -> None:
        plans.append(plan_resume(config))
        if plans[0].nothing_to_do is None:
            _check_folders(config, folders)

    with lock_folders(folders, log_dir=logs, hint=" (run_name sets both folders of a run)", check=check):
        yield plans[0]


def lock_evaluation_folder(folder: Path | None) -> AbstractContextManager[None]:
    """Lock the folder of an evaluation, if it writes any."""
    return lock_folders({"eval.save_path": folder.absolute()} if folder else {})


def _check_folders(config: TrainingRunConfig, folders: Mapping[str, Path]) -> None:
    for name in WRITTEN_IN_LOGS:
        inner = folders[LOG_DIR] / name
        if inner.exists() or inner.is_symlink():
            probe_folder(LOG_DIR, shorten_path(inner))
    for key, folder in list_folders(config).items():
        if key not in folders:
            probe_folder(key, shorten_path(folder))
    if CHECKPOINT_DIR in folders:
        checkpoints = shorten_path(folders[CHECKPOINT_DIR])
        check_entries(CHECKPOINT_DIR, checkpoints)
        if needed := _estimate_checkpoint(config):
            check_space(CHECKPOINT_DIR, checkpoints, needed, "one checkpoint")


def _estimate_checkpoint(config: TrainingRunConfig) -> int | None:
    """Return the size of a checkpoint's weights in bytes, from the headers of a local model; None if unknown.

    A lower bound without the optimizer, so that a clear lack of space is reported before the model loads.
    """
    policy = config.policy
    folder = Path(policy.model_name)
    if not folder.is_dir() or policy.adapter_rank is not None:
        return None
    try:
        count = sum(_count_parameters(path) for path in folder.glob("*.safetensors"))
    except (OSError, ValueError):
        return None  # reported when the model is loaded
    return count * (2 if policy.weights_dtype == "bfloat16" else 4) or None


def _count_parameters(path: Path) -> int:
    with path.open("rb") as file:
        header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), 1 << 27)))
    count = 0
    for name, entry in header.items():
        size = 1
        for length in entry["shape"] if name != "__metadata__" else (0,):
            size *= length
        count += size
    return count


def check_checkpoint_space(config: TrainingRunConfig, learners: Mapping[str, LearnerClient], tracker: Tracker) -> None:
    """Check that there is space for a checkpoint of the loaded models; note if there is not enough for all checkpoints to keep.
    Raises StorageError.

    Ranks in other processes are not queried; the earlier estimate covers them.
    """
    saving = config.checkpointing
    sizes = [_checkpoint_bytes(learner, optimizer=saving.save_optimizer) for learner in learners.values()]
    if not saving.saving_enabled or not all(sizes):
        return
    folder, needed = Path(saving.checkpoint_dir), sum(sizes)
    check_space(CHECKPOINT_DIR, folder, needed, "one checkpoint")
    kept = len([path for path in folder.glob("step_*") if path.is_dir()])
    wanted = None if saving.keep_top_k is None else max(1, saving.keep_top_k + 2 - kept)  # the best, the newest and a draft
    if wanted is not None and free_bytes(folder) < wanted * needed:
        tracker.note(
            f"warning: {CHECKPOINT_DIR}: {folder} has {format_bytes(free_bytes(folder))} free, and {wanted} more checkpoints "
            f"(checkpointing.keep_top_k={saving.keep_top_k}, the newest, and the one being written) need "
            f"{format_bytes(wanted * needed)}"
        )


def _checkpoint_bytes(learner: LearnerClient, *, optimizer: bool) -> int:
    """Return the size of a learner's weights and optimizer in a checkpoint; 0 for a learner in another process."""
    target = learner.caller.target if isinstance(learner.caller, InlineCaller) else None
    if not isinstance(target, TorchLearner):
        return 0
    trained = sum(parameter.numel() for parameter in target.parameters)
    saved = list(target.parameters) if target.config.dtensor_cfg.lora_cfg.enabled else list(target.model.parameters())
    weights = sum(parameter.numel() * parameter.element_size() for parameter in saved)
    averages = 1 + target.config.ema.enabled
    is_adam = "adam" in target.config.optimizer.name.lower() and "8bit" not in target.config.optimizer.name.lower()
    return weights * averages + (4 * ADAM_STATES * trained if optimizer and is_adam else 0)
