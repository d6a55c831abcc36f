"""Evaluations that were stored: where those of a model are, and their tasks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from strop.checkpointing.saved_model import RUN_CONFIG, SavedModel, SavedModelNotFound, find_saved_model
from strop.statistics.not_comparable import NotComparable
from strop.statistics.setting_differences import Identity

STEP_FILE = re.compile(r"step_(\d+)\.json")
UNFINISHED = "tasks.jsonl"  # what an evaluation that was interrupted leaves


@dataclass(frozen=True)
class StoredEvaluation:
    """The file of an evaluation."""

    path: Path

    @cached_property
    def _content(self) -> Mapping[str, Any]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise NotComparable(f"{self.path} cannot be read as an evaluation: {error}") from error
        return content if isinstance(content, dict) else {}

    @property
    def identity(self) -> Identity | None:
        """How the tasks were sampled and scored; None if the file does not say."""
        return self._content.get("identity")

    @property
    def tasks(self) -> Sequence[Mapping[str, Any]]:
        """The tasks with their samples. Raises NotComparable if the file is no evaluation."""
        tasks = self._content.get("tasks")
        if not isinstance(tasks, list) or not tasks or not all(isinstance(task, dict) and task.get("samples") for task in tasks):
            raise NotComparable(
                f"{self.path} is no evaluation with samples: it needs 'tasks', each with 'samples', as strop eval and the validations of a "
                "run write them"
            )
        return tasks

    @property
    def run_config(self) -> Path | None:
        """The configuration of the run that the file lies in: validation/step_N.json, evaluations/NAME/step_N.json."""
        folders = (self.path.resolve().parents[1], self.path.resolve().parents[2])
        return next((folder / RUN_CONFIG for folder in folders if (folder / RUN_CONFIG).is_file()), None)


@dataclass(frozen=True, kw_only=True)
class ComparedSide:
    """One of the two that are compared: a stored evaluation, or a model with the evaluations that are stored of it."""

    name: str  # as the user wrote it
    model: SavedModel | None = None
    stored: tuple[StoredEvaluation, ...] = ()  # the newest last

    @property
    def is_run(self) -> bool:
        """Whether it has the configuration of a run, which says what is evaluated."""
        return self.config_file is not None

    @property
    def config_file(self) -> Path | None:
        return self.model.config_file if self.model is not None else self.stored[0].run_config


def find_side(name: str, *, step: int | None = None, best: bool = False, ema: bool = False) -> ComparedSide:
    """Find what a name stands for: a file or folder of an evaluation, a run, a checkpoint or a model.

    ``step``, ``best`` and ``ema`` choose as ``strop eval`` does; ``step`` also among the evaluations in a folder.

    Raises NotComparable.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return ComparedSide(name=name, stored=(StoredEvaluation(path),))
    files = _list_steps(path)
    if files:
        return ComparedSide(name=name, stored=(StoredEvaluation(_choose_step(path, files, step)),))
    if (path / UNFINISHED).is_file():
        raise NotComparable(f"the evaluation in {path} did not finish; the same strop eval command continues it")
    try:
        model = find_saved_model(name, step=step, best=best, ema=ema)
    except SavedModelNotFound as error:
        validations = _list_steps(path / "validation")
        if validations and not (best or ema):  # a run that keeps no such checkpoint
            return ComparedSide(name=name, stored=(StoredEvaluation(_choose_step(path / "validation", validations, step)),))
        raise NotComparable(str(error)) from error
    return ComparedSide(name=name, model=model, stored=() if ema else _list_stored(model))


def _list_stored(model: SavedModel) -> tuple[StoredEvaluation, ...]:
    """Return the evaluations of a checkpoint in the log folder of its run, or next to it."""
    if model.step is None or model.checkpoint is None:
        return ()
    folder, file = model.log_folder or model.checkpoint.parent, f"step_{model.step:06d}.json"
    paths = [folder / "validation" / file, *sorted(folder.glob(f"evaluations/*/{file}"))]
    return tuple(StoredEvaluation(path) for path in paths if path.is_file())


def _list_steps(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    found = ((STEP_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match is not None))


def _choose_step(folder: Path, files: Mapping[int, Path], step: int | None) -> Path:
    if step is None:
        return list(files.values())[-1]
    if step not in files:
        raise NotComparable(f"{folder} has no evaluation of step {step}; there are: {', '.join(map(str, files))}")
    return files[step]
