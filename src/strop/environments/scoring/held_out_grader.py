"""Graders that are never trained on: functions of one's own, or the verifiers of math."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast, get_args, get_type_hints

from strop.environments.base import EnvironmentConfigError, import_user_code
from strop.environments.math import MathEnvironment
from strop.types import Rollout, Task
from strop.user_code import suggest_names

HeldOutGrader = Callable[[Task, Rollout], Any]


def import_grader(name: str, key: str) -> HeldOutGrader:
    """Return the grader that the key of a configuration names: ``file.py:function``, or a verifier. Raises EnvironmentConfigError."""
    if ":" not in name:
        verifiers = get_args(get_type_hints(MathEnvironment)["verifier"])
        if name not in verifiers:
            raise EnvironmentConfigError(
                f"{key}: there is no verifier {name!r}{suggest_names(name, verifiers)}. Name a function of your own as file.py:function"
            )
        return cast("HeldOutGrader", MathEnvironment(verifier=cast("Any", name)).correct)
    grader: Any = import_user_code(name)
    if not callable(grader) or isinstance(grader, type):
        raise EnvironmentConfigError(f"{key}: {name} is {grader!r:.80}, not a function; it is called with (task, rollout)")
    return cast("HeldOutGrader", grader)
