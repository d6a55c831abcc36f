"""The folder of an evaluation, with its finished tasks, from which it continues."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.checkpointing.saved_model import SavedModel
from strop.monitoring.rollout_store.rollout_record import encodable
from strop.runs.evaluation_job import EvaluationIdentity, EvaluationJob, identify
from strop.runs.run_folders import lock_evaluation_folder
from strop.storage.files import atomic_write
from strop.storage.folder_lock import FolderLocked

TASKS_FILE, PREVIOUS_FILE, VERSION = "tasks.jsonl", "tasks.previous.jsonl", 1
MOST_NAMED = 4  # changed settings in a message


class TaskLog:
    """Appends finished tasks to ``<folder>/tasks.jsonl``, and holds those finished earlier with the same settings."""

    def __init__(self, folder: Path, identity: EvaluationIdentity) -> None:
        """Read the finished tasks, and move those with other settings aside. ``changes`` describes the differences."""
        self.folder, self.path = folder, folder / TASKS_FILE
        self.changes: list[str] = []
        header = {"version": VERSION, **identity.to_json()}
        self._tasks: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in identity.sets}
        old, lines = read_tasks(self.path)
        if old is not None:
            self.changes = describe_changes(old, header)
            for entry in lines:
                name = entry["set"]
                if (
                    old["settings"] == header["settings"]
                    and name in header["sets"]
                    and old["sets"].get(name) == header["sets"][name]
                ):
                    self._tasks[name][entry["index"]] = entry["task"]
            if self.changes:
                os.replace(self.path, folder / PREVIOUS_FILE)
        with atomic_write(self.path) as temporary, temporary.open("w", encoding="utf-8") as file:
            for content in (header, *self._list_entries()):
                file.write(_to_line(content))
        self._file = self.path.open("a", encoding="utf-8")

    def of_set(self, name: str) -> FinishedTasksOfSet:
        return FinishedTasksOfSet(self, name)

    def tasks_of(self, name: str) -> Mapping[int, dict[str, Any]]:
        return self._tasks[name]

    @property
    def count(self) -> int:
        return sum(map(len, self._tasks.values()))

    def add(self, name: str, index: int, task: dict[str, Any]) -> None:
        self._tasks[name][index] = task
        self._file.write(_to_line({"set": name, "index": index, "task": task}))
        self._file.flush()  # the kernel has it now, even if this process dies

    def close(self, *, complete: bool) -> None:
        """Close the file, and remove it if it is empty, or if the result contains all of it."""
        self._file.close()
        if complete or not self.count:
            self.path.unlink(missing_ok=True)

    def _list_entries(self) -> Iterator[dict[str, Any]]:
        for name, tasks in self._tasks.items():
            yield from ({"set": name, "index": index, "task": task} for index, task in tasks.items())


@dataclass(frozen=True)
class FinishedTasksOfSet:
    """The finished tasks of one set."""

    log: TaskLog
    name: str

    @property
    def tasks(self) -> Mapping[int, dict[str, Any]]:
        return self.log.tasks_of(self.name)

    def add(self, index: int, task: dict[str, Any]) -> None:
        self.log.add(self.name, index, task)


def read_tasks(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the first line and the others; None and nothing for a missing file or one of another version. A truncated last line
    is skipped.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None, []
    entries: list[dict[str, Any]] = []
    for line in text.split("\n"):
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    if not entries or entries[0].get("version") != VERSION:
        return None, []
    return entries[0], entries[1:]


def describe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differing settings of the sets that both have, as ``KEY: OLD -> NEW``."""
    pairs = [("", old["settings"], new["settings"])]
    pairs += [(f"{name}: ", old["sets"][name], settings) for name, settings in new["sets"].items() if name in old["sets"]]
    changes: list[str] = []
    for where, before, after in pairs:
        keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        changes += [f"{where}{key}: {' -> '.join(map(_shorten, _differing(before.get(key), after.get(key))))}" for key in keys]
    return changes[:MOST_NAMED] + ([f"and {len(changes) - MOST_NAMED} more"] if len(changes) > MOST_NAMED else [])


def _differing(before: Any, after: Any) -> tuple[Any, Any]:
    """Return two values; of lists, such as the files of a model, only the elements missing in the other."""
    if not (isinstance(before, list) and isinstance(after, list)):
        return before, after
    return [each for each in before if each not in after], [each for each in after if each not in before]


def _to_line(content: Mapping[str, Any]) -> str:
    return encodable(json.dumps(content, ensure_ascii=False)) + "\n"


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


AUTO, DEFAULT_PARENT = "auto", Path("results/evals")


@contextmanager
def open_folder(job: EvaluationJob, note: Callable[[str], object]) -> Iterator[TaskLog | None]:
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
            yield log
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
