"""Build environments from a configuration: built-in ones by name, others as ``module:Class``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import isroutine
from typing import Any

from strop import plugins
from strop.environments.base import Environment, EnvironmentConfigError, import_user_code
from strop.environments.rewards import RewardMark
from strop.environments.verifiers.base import build_from_options
from strop.user_code import suggest_names

ENVIRONMENTS = {
    "arithmetic": "strop.environments.arithmetic:Arithmetic",
    "reward_function": "strop.environments.function_environment:FunctionEnvironment",
}


def list_environments() -> list[str]:
    """Return the names of all environments, including those of extensions."""
    return sorted({*ENVIRONMENTS, *plugins.declared("environments")})


def make_environment(name: str, options: Mapping[str, Any] | None = None) -> Environment[Any]:
    """Build the environment ``name``. Raises EnvironmentConfigError for an unknown name and for unknown, ill-typed or missing options."""
    return build_from_options(environment_class(name), f"the environment {name}", options or {})


def list_marks(name: str, options: Mapping[str, Any]) -> Mapping[str, RewardMark]:
    """Return, by name, how the rewards of an environment with these options count. Raises EnvironmentConfigError."""
    marks, weights = environment_class(name).list_marks(options), options.get("reward_weights") or {}
    return {key: replace(mark, weight=weights[key], schedule=None) if key in weights else mark for key, mark in marks.items()}


def gives_turn_states(name: str) -> bool:
    """Return whether an environment reports the state in which a turn was taken. Raises EnvironmentConfigError."""
    return environment_class(name).turn_states is not Environment.turn_states


def environment_class(name: str) -> type[Environment[Any]]:
    """Return the class of a registered name, ``module:Class`` or ``path/to/file.py:Class``. Raises EnvironmentConfigError."""
    path = ENVIRONMENTS.get(name) or plugins.find_path("environments", name) or name
    if ":" not in path:
        raise EnvironmentConfigError(
            f"there is no environment {name!r}{suggest_names(name, list_environments())}. Name your own as module:Class or file.py:Class, "
            "or set env.ALIAS.reward to a function, as file.py:function, and no type"
        )
    kind = import_user_code(path)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        instead = f"; to use it as a reward, set env.ALIAS.reward={name} in place of the type" if isroutine(kind) else ""
        raise EnvironmentConfigError(f"{name} is {kind!r:.80}, not a subclass of strop.environments.base.Environment{instead}")
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise EnvironmentConfigError(f"{name} does not define {', '.join(missing)}, which an environment must")
    if "__dataclass_fields__" not in vars(kind) and vars(kind).get("__annotations__"):
        raise EnvironmentConfigError(f"{name} has options but is not decorated with @dataclass(frozen=True, kw_only=True)")
    return kind
