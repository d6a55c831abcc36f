"""Create a curriculum from its configuration section and the tasks of an entry."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from strop.data.curriculum.base import Curriculum
from strop.data.curriculum.curriculum_config import CurriculumConfig
from strop.data.curriculum.difficulty_curriculum import DifficultyCurriculum
from strop.data.curriculum.success_rate_curriculum import SuccessRateCurriculum
from strop.data.sources.records import DataError
from strop.safety.exits import contain_exits
from strop.types import Task
from strop.user_code import UserCodeError, describe_error, describe_value, import_attribute

KEY = "data.curriculum"


def make_curriculum(config: CurriculumConfig, tasks: Sequence[Task], entry: str, seed: int) -> Curriculum:
    """Create the curriculum for an entry's tasks. ``entry`` names the entry in messages. Raises DataError."""
    if hasattr(tasks, "load_state"):
        raise DataError(
            f"{KEY}.name is {config.name}, but {entry} is read as a stream, in which no task can be chosen by its number; set {KEY}.name="
            "none, or read the data as a whole"
        )
    match config.name:
        case "difficulty":
            return DifficultyCurriculum(read_difficulties(str(config.difficulty.by), tasks, entry), config.difficulty, seed)
        case "success_rate":
            return SuccessRateCurriculum(len(tasks), config.success_rate)
    return _make_own(config, tasks)


def read_difficulties(by: str, tasks: Sequence[Task], entry: str) -> list[float]:
    """Return the difficulty of each task, from a column of its row or a function. Raises DataError."""
    measure = _import_function(by) if ":" in by else lambda task: read_column(task, by)
    return [_measure_task(measure, tasks[index], by, entry) for index in range(len(tasks))]


def read_column(task: Task, column: str) -> Any:
    """Return the value of a column, or of a nested one as ``a.b``. Raises DataError."""
    value: Any = task.metadata
    names = [column] if column in task.metadata else column.split(".")
    for name in names:
        if not isinstance(value, dict) or name not in value:
            raise DataError(
                f"{task.id} has no column {column!r}; there are: {', '.join(map(str, task.metadata)) or 'none'}. Set "
                f"{KEY}.difficulty.by to one of these, or to a function of a task as file.py:name"
            )
        value = value[name]
    return value


def _measure_task(measure: Callable[[Task], Any], task: Task, by: str, entry: str) -> float:
    try:
        with contain_exits():
            value = measure(task)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{KEY}.difficulty.by: {by} raised {describe_error(error)} for {task.id} of {entry}") from error
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"{KEY}.difficulty.by: {by} is {describe_value(value)} for {task.id} of {entry}, which is not a number; name a column of "
            "numbers, or a function of a task as file.py:name that returns one"
        )
    return number


def _import_function(path: str) -> Callable[[Task], Any]:
    function = _import(path, f"{KEY}.difficulty.by")
    if not callable(function):
        raise DataError(f"{KEY}.difficulty.by: {path} is {describe_value(function)}, not a function of a task")
    measure: Callable[[Task], Any] = function
    return measure


def _make_own(config: CurriculumConfig, tasks: Sequence[Task]) -> Curriculum:
    kind = _import(config.name, f"{KEY}.name")
    if not (isinstance(kind, type) and issubclass(kind, Curriculum)):
        raise DataError(
            f"{KEY}.name: {config.name} is {describe_value(kind)}, not a subclass of strop.data.curriculum.base.Curriculum"
        )
    try:
        with contain_exits():
            curriculum: Curriculum = kind(tasks=tasks, **config.kwargs)  # type: ignore[call-arg]
    except Exception as error:
        raise DataError(
            f"{KEY}: {config.name}(tasks=..., {', '.join(f'{name}=...' for name in config.kwargs)}) raised {describe_error(error)}"
        ) from error
    return curriculum


def _import(path: str, key: str) -> Any:
    try:
        return import_attribute(path)
    except UserCodeError as error:
        raise DataError(f"{key}: {error}") from error
