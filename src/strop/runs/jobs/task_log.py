"""The finished tasks of an evaluation, written as they finish, so that an interrupted evaluation can continue.

<folder>/tasks.jsonl             first line: {"version", "settings", "sets": {NAME: settings}}; then {"set", "index", "task"}, one each
<folder>/tasks.previous.jsonl    those of an evaluation with other settings
<folder>/step_NNNNNN.json        the result, which takes the place of tasks.jsonl when every task is finished
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.monitoring.rollout_store.rollout_record import encodable
from strop.runs.jobs.evaluation_identity import EvaluationIdentity
from strop.storage.atomic_file import atomic_write

TASKS_FILE, PREVIOUS_FILE, VERSION = "tasks.jsonl", "tasks.previous.jsonl", 1
MOST_NAMED = 4  # changed settings in a message


class TaskLog:
    """Appends finished tasks to ``<folder>/tasks.jsonl``, and holds those finished earlier with the same settings."""

    def __init__(self, folder: Path, identity: EvaluationIdentity) -> None:
        """Read the finished tasks, and move those with other settings aside. ``changes`` describes the differences."""
        self.path = folder / TASKS_FILE
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
