"""Graders that are never used in training: your own functions, verifiers, or the methods of the environment math."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args, get_type_hints

from strop.environments.base import EnvironmentConfigError, import_user_code
from strop.environments.math import MathEnvironment
from strop.environments.verifier_registry import list_verifiers, make_verifier
from strop.environments.verifiers.base import Score, Verifier, call_score, read_reply
from strop.types import Rollout, Task
from strop.user_code import suggest_names

HeldOutGrader = Callable[[Task, Rollout], Any]


@dataclass(frozen=True)
class VerifierGrader:
    """A verifier as a grader of a rollout's last turn; the rollout is not changed."""

    verifier: Verifier

    async def __call__(self, task: Task, rollout: Rollout) -> float:
        scored = await call_score(self.verifier, task, read_reply(rollout))
        return float(scored.value if isinstance(scored, Score) else scored)


def make_grader(given: str | Mapping[str, Any], key: str) -> HeldOutGrader:
    """Return the grader configured by a key: ``file.py:function``, a verifier's name, or a mapping of ``verifier`` and
    its options. Raises EnvironmentConfigError."""
    try:
        return _make_grader(given)
    except EnvironmentConfigError as error:
        raise EnvironmentConfigError(f"{key}: {error}") from error


def _make_grader(given: str | Mapping[str, Any]) -> HeldOutGrader:
    options = {"function" if ":" in given else "verifier": given} if isinstance(given, str) else dict(given)
    if len({"function", "verifier"} & set(options)) != 1:
        raise EnvironmentConfigError(
            f"a grader is a function or a verifier, and {options} does not name one of them; set verifier"
        )
    name = options.pop("verifier", None)
    if name is not None:
        methods = get_args(get_type_hints(MathEnvironment)["verifier"])
        if name in methods and not options:
            return cast("HeldOutGrader", MathEnvironment(verifier=cast("Any", name)).correct)
        if isinstance(name, str) and ":" not in name and name not in list_verifiers():
            hint = suggest_names(name, (*list_verifiers(), *methods))
            raise EnvironmentConfigError(f"there is no verifier {name!r}{hint}. Name your own function as file.py:function")
        return _grade_with(make_verifier(name, options), name)
    name = options.pop("function")
    grader: Any = import_user_code(name)
    if isinstance(grader, type) and issubclass(grader, Verifier):
        return _grade_with(make_verifier(name, options), name)
    if options:
        raise EnvironmentConfigError(f"the function {name} has no option {next(iter(options))!r}; only verifiers have options")
    if not callable(grader) or isinstance(grader, type):
        raise EnvironmentConfigError(f"{name} is {grader!r:.80}, not a function; it is called with (task, rollout)")
    return cast("HeldOutGrader", grader)


def _grade_with(verifier: Verifier, name: str) -> VerifierGrader:
    if verifier.compares:
        raise EnvironmentConfigError(
            f"the verifier {name} compares the rollouts of a task, and a grader sees one rollout at a time; set another verifier, or "
            "against: reference where it has that"
        )
    return VerifierGrader(verifier)
