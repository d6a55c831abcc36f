"""Build environments from a configuration: built-in ones by name, others as ``module:Class``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from inspect import isroutine
from typing import Any, get_type_hints

from strop.environments.base import Environment, EnvironmentConfigError, import_user_code
from strop.user_code import suggest_names

ENVIRONMENTS = {
    "agent": "strop.environments.agents.external_agent:ExternalAgent",
    "arithmetic": "strop.environments.arithmetic:Arithmetic",
    "gymnasium": "strop.environments.adapters.gymnasium_environment:GymnasiumEnvironment",
    "lm_eval": "strop.environments.adapters.lm_eval_environment:LmEvalEnvironment",
    "math": "strop.environments.math:MathEnvironment",
    "math_multi_reward": "strop.environments.math_multi_reward:MathMultiReward",
    "nemo_gym": "strop.environments.adapters.nemo_gym_environment:NemoGymEnvironment",
    "openenv": "strop.environments.adapters.openenv_environment:OpenEnvEnvironment",
    "reasoning_gym": "strop.environments.reasoning_gym:ReasoningGym",
    "reward_function": "strop.environments.function_environment:FunctionEnvironment",
    "reward_model": "strop.environments.reward_model_environment:RewardModelEnvironment",
    "textarena": "strop.environments.adapters.textarena_environment:TextArenaEnvironment",
    "verifiers": "strop.environments.adapters.verifiers_environment:VerifiersEnvironment",
}


def make_environment(name: str, options: Mapping[str, Any] | None = None) -> Environment[Any]:
    """Build the environment ``name``. Raises EnvironmentConfigError for an unknown name and for unknown, ill-typed or missing options."""
    from pydantic import TypeAdapter, ValidationError

    kind = environment_class(name)
    known = {item.name: item for item in fields(kind) if item.init}
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for option, value in (options or {}).items():
        if option not in known:
            raise EnvironmentConfigError(f"the environment {name} has no option {option!r}{suggest_names(option, known)}")
        if types[option] is Any:  # checked by the environment, and perhaps no JSON
            values[option] = value
            continue
        try:  # in JSON mode a list may stand for a tuple, while "3" is not a number
            values[option] = TypeAdapter(types[option]).validate_json(json.dumps(value), strict=True)
        except (ValidationError, TypeError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise EnvironmentConfigError(f"the option {option} of the environment {name} is {value!r}: {why}") from error
    for option, item in known.items():
        if option not in values and item.default is MISSING and item.default_factory is MISSING:
            raise EnvironmentConfigError(f"the environment {name} needs the option {option}; set it")
    return kind(**values)


def list_rewards(name: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the rewards of an environment. Raises EnvironmentConfigError."""
    return environment_class(name).list_rewards(options)


def list_step_rewards(name: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the rewards of an environment that are of steps of a rollout. Raises EnvironmentConfigError."""
    return environment_class(name).list_step_rewards(options)


def environment_class(name: str) -> type[Environment[Any]]:
    """Return the class of a registered name, ``module:Class`` or ``path/to/file.py:Class``. Raises EnvironmentConfigError."""
    path = ENVIRONMENTS.get(name, name)
    if ":" not in path:
        raise EnvironmentConfigError(
            f"there is no environment {name!r}{suggest_names(name, ENVIRONMENTS)}. Name your own as module:Class or file.py:Class, "
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
