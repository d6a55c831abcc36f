"""Build environments from a configuration: built-in ones by name, others as ``module:Class``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import isroutine
from typing import Any

from strop.environments.base import Environment, EnvironmentConfigError, import_user_code
from strop.environments.rewards import RewardMark
from strop.environments.verifiers.options import build_from_options
from strop.user_code import suggest_names

ENVIRONMENTS = {
    "agent": "strop.environments.agents.external_agent:ExternalAgent",
    "arithmetic": "strop.environments.arithmetic:Arithmetic",
    "code": "strop.environments.code.code_environment:CodeEnvironment",
    "code_interpreter": "strop.environments.code.code_interpreter:CodeInterpreter",
    "code_jaccard": "strop.environments.code.code_jaccard:CodeJaccard",
    "drawn_images": "strop.environments.images.drawn_images:DrawnImages",
    "gymnasium": "strop.environments.adapters.gymnasium_environment:GymnasiumEnvironment",
    "humaneval": "strop.environments.code.humaneval:HumanEval",
    "ifeval": "strop.environments.instructions.instruction_following:InstructionFollowing",
    "lm_eval": "strop.environments.adapters.lm_eval_environment:LmEvalEnvironment",
    "math": "strop.environments.math:MathEnvironment",
    "math_multi_reward": "strop.environments.math_multi_reward:MathMultiReward",
    "nemo_gym": "strop.environments.adapters.nemo_gym_environment:NemoGymEnvironment",
    "number_guessing": "strop.environments.games.number_guessing:NumberGuessing",
    "openenv": "strop.environments.adapters.openenv_environment:OpenEnvEnvironment",
    "reasoning_gym": "strop.environments.reasoning_gym:ReasoningGym",
    "reward_function": "strop.environments.function_environment:FunctionEnvironment",
    "reward_model": "strop.environments.reward_model_environment:RewardModelEnvironment",
    "sliding_puzzle": "strop.environments.games.sliding_puzzle:SlidingPuzzle",
    "sliding_puzzle_game": "strop.environments.games.sliding_puzzle:SlidingPuzzle",  # its name in NeMo-RL
    "text_adventure": "strop.environments.games.text_adventure:TextAdventure",
    "textarena": "strop.environments.adapters.textarena_environment:TextArenaEnvironment",
    "two_player": "strop.environments.games.two_player.two_player:TwoPlayer",
    "user_simulator": "strop.environments.games.user_simulator:UserSimulator",
    "verifiers": "strop.environments.adapters.verifiers_environment:VerifiersEnvironment",
    "vlm": "strop.environments.images.vlm_environment:VlmEnvironment",
}


def make_environment(name: str, options: Mapping[str, Any] | None = None) -> Environment[Any]:
    """Build the environment ``name``. Raises EnvironmentConfigError for an unknown name and for unknown, ill-typed or missing options."""
    return build_from_options(environment_class(name), f"the environment {name}", options or {})


def list_marks(name: str, options: Mapping[str, Any]) -> Mapping[str, RewardMark]:
    """Return how the rewards of an environment count, by name, as its options say. Raises EnvironmentConfigError."""
    marks, weights = environment_class(name).list_marks(options), options.get("reward_weights") or {}
    return {key: replace(mark, weight=weights[key], schedule=None) if key in weights else mark for key, mark in marks.items()}


def gives_turn_states(name: str) -> bool:
    """Return whether an environment says in which state a turn was taken. Raises EnvironmentConfigError."""
    return environment_class(name).turn_states is not Environment.turn_states


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
