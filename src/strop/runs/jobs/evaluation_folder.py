"""The folder for an evaluation's samples: a named one, one left unfinished, or a new one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from strop.checkpointing.saved_model import SavedModel
from strop.runs.jobs.evaluation_identity import EvaluationIdentity, identify
from strop.runs.jobs.evaluation_job import EvaluationJob
from strop.runs.jobs.task_log import TASKS_FILE, TaskLog, describe_changes, read_tasks
from strop.runs.run_folders import lock_evaluation_folder
from strop.storage.folder_lock import FolderLocked

AUTO, DEFAULT_PARENT = "auto", Path("results/evals")


@dataclass(frozen=True)
class OpenFolder:
    """An evaluation's locked folder, and its finished tasks."""

    path: Path
    log: TaskLog


@contextmanager
def open_folder(job: EvaluationJob, note: Callable[[str], object]) -> Iterator[OpenFolder | None]:
    """Lock an evaluation's folder, and read its finished tasks; None if nothing is to be stored.

    Raises FolderLocked, StorageError.
    """
    chosen = job.scoring.save_path
    if not chosen:
        yield None
        return
    identity = identify(job)
    with ExitStack() as stack:
        if chosen == AUTO:
            parent = choose_parent(job.model)
            folder = _find_unfinished(parent, identity, stack) or _make_folder(parent, stack)
        else:
            folder = Path(chosen)
            stack.enter_context(lock_evaluation_folder(folder))
        log = TaskLog(folder, identity)
        if log.changes:
            note(f"the finished tasks in {folder} have other settings, and are moved aside: {'; '.join(log.changes)}")
        if log.count:
            note(f"continuing the evaluation in {folder}: {log.count} {'task is' if log.count == 1 else 'tasks are'} finished")
        try:
            yield OpenFolder(folder, log)
        except BaseException:
            log.close(complete=False)
            raise
        log.close(complete=True)


def choose_parent(model: SavedModel) -> Path:
    """Return the parent folder for a model's evaluations: in the log folder of its run, next to its checkpoints, or in
    results/evals.
    """
    checkpoints = None if model.checkpoint is None else model.checkpoint.parent
    if (of_run := model.log_folder or checkpoints) is not None:
        return of_run / "evaluations"
    parts = Path(model.weights).parts
    return DEFAULT_PARENT / re.sub(r"[^\w.-]", "_", "-".join(parts[-3:] if parts[-1:] == ("weights",) else parts[-1:]) or "model")


def _find_unfinished(parent: Path, identity: EvaluationIdentity, stack: ExitStack) -> Path | None:
    """Return the newest folder with unfinished tasks of the same settings that no other process uses, locked."""
    header = identity.to_json()
    for tasks in sorted(parent.glob(f"*/{TASKS_FILE}"), reverse=True):
        with suppress(FolderLocked):
            stack.enter_context(lock_evaluation_folder(tasks.parent))
            old, _ = read_tasks(tasks)
            if old is not None and not describe_changes(old, header) and set(old["sets"]) == set(header["sets"]):
                return tasks.parent
            stack.pop_all().close()
    return None


def _make_folder(parent: Path, stack: ExitStack) -> Path:
    """Make a new folder, named by the time, and lock it. It is removed again if it stays empty."""
    started = time.strftime("%Y%m%d-%H%M%S")
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (started if number == 1 else f"{started}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            continue
        stack.callback(_remove_if_empty, folder)
        stack.enter_context(lock_evaluation_folder(folder))
        return folder


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
