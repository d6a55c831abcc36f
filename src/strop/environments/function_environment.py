"""Plain functions as rewards: rows of a dataset, answered in one turn and scored by functions of (task, rollout).

def correct(task, rollout):             # a number or a bool, for each rollout
    return task.answer in rollout.text

def shortest(task, rollouts):           # one for each rollout of the prompt, all at once
    return [rollout.sampled_tokens == min(each.sampled_tokens for each in rollouts) for rollout in rollouts]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from strop.environments.base import (
    DatasetEnvironment,
    Environment,
    EnvironmentConfigError,
    RewardFunction,
    RewardMark,
    import_user_code,
    is_finite,
    takes_rollouts,
)
from strop.user_code import suggest_names

OPTIONS = ("function", "weight", "accuracy", "group", "per_turn")
CALLS = (
    "a reward is called with (task, rollout), or with (task, rollouts) for all rollouts of a prompt at once: rollout.text is the "
    "completion, task.answer the reference answer, task.metadata the row"
)


@dataclass(frozen=True, kw_only=True)
class FunctionEnvironment(DatasetEnvironment):
    """Scores with functions, which may be async. Each is a Python function, ``file.py:name``, ``module:name``, or a mapping of
    ``function`` with ``weight`` (default 1), ``accuracy``, ``group`` and ``per_turn``, as in ``strop.environments.base.reward``.

    Evaluation reports as accuracy the reward with ``accuracy: true``, else the only one annotated to return bool, else the only reward,
    else the total.
    """

    reward: Any = None  # one function
    rewards: Any = None  # several: a list of functions, logged by their own names, or a mapping of names to functions

    needs_answers: ClassVar[bool] = False

    @cached_property
    def reward_functions(self) -> Mapping[str, RewardFunction]:
        functions: dict[str, RewardFunction] = {}
        accuracies: dict[str, bool | None] = {}
        for key, given in self._list_given():
            name, function, accuracy = _make_reward(key, given)
            if name in functions:
                raise EnvironmentConfigError(f"two rewards are named {name!r}; set rewards to a mapping of names to functions")
            functions[name], accuracies[name] = function, accuracy
        chosen = _choose_accuracy(functions, accuracies)
        return {name: replace(each, mark=replace(each.mark, accuracy=name == chosen)) for name, each in functions.items()}

    @property
    def declares_accuracy(self) -> bool:
        made = [_make_reward(key, given) for key, given in self._list_given()]
        return any(accuracy or (accuracy is None and _returns_bool(each.function)) for _, each, accuracy in made)

    @classmethod
    def list_rewards(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(cls._make_functions(options))

    @classmethod
    def list_step_rewards(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(name for name, each in cls._make_functions(options).items() if each.mark.per_turn)

    @classmethod
    def _make_functions(cls, options: Mapping[str, Any]) -> Mapping[str, RewardFunction]:
        return cls(**{name: options[name] for name in ("reward", "rewards") if name in options}).reward_functions

    def _list_given(self) -> Iterator[tuple[str | None, Any]]:
        """Yield (name, what the configuration gives for it) of every reward; the name is None where the function's own counts."""
        if self.reward is not None and self.rewards is not None:
            raise EnvironmentConfigError("reward and rewards are both set; keep one")
        given = self.reward if self.rewards is None else self.rewards
        if not given:
            raise EnvironmentConfigError(
                "there is no reward; set reward to a function, as file.py:name or module:name, or rewards to several of them"
            )
        if isinstance(given, list | tuple):
            yield from ((None, each) for each in given)
        elif isinstance(given, Mapping) and "function" not in given:
            yield from given.items()
        else:
            yield None, given


def _make_reward(name: str | None, given: Any) -> tuple[str, RewardFunction, bool | None]:
    """Return the name of a reward, its function, and whether it is the accuracy (None: not said). Raises EnvironmentConfigError."""
    options = given if isinstance(given, Mapping) else {"function": given}
    for option in options:
        if option not in OPTIONS:
            raise EnvironmentConfigError(f"the reward {name} has no option {option!r}{suggest_names(str(option), OPTIONS)}")
    function = options.get("function")
    if function is None:
        raise EnvironmentConfigError(f"the reward {name} has no function; set function to file.py:name or module:name")
    source = function if isinstance(function, str) else getattr(function, "__qualname__", repr(function))
    if isinstance(function, str):
        if ":" not in function:
            raise EnvironmentConfigError(f"the reward {function!r} is not a function; write file.py:name or module:name")
        function = import_user_code(function)
    if isinstance(function, type) and issubclass(function, Environment):
        raise EnvironmentConfigError(f"the reward {source} is an environment; set type to it in place of reward")
    if not callable(function) or isinstance(function, type):
        raise EnvironmentConfigError(f"the reward {source} is {function!r:.80}, not a function; {CALLS}")
    _check_parameters(function, source)
    mark = getattr(function, "__reward__", None) or RewardMark(group=takes_rollouts(function))
    weight, group = options.get("weight", mark.weight), options.get("group", mark.group)
    accuracy, per_turn = options.get("accuracy", mark.accuracy or None), options.get("per_turn", mark.per_turn)
    if isinstance(weight, bool) or not is_finite(weight):
        raise EnvironmentConfigError(f"the weight of the reward {source} is {weight!r}; set it to a finite number")
    for option, value in (("accuracy", accuracy), ("group", group), ("per_turn", per_turn)):
        if value is not None and not isinstance(value, bool):
            raise EnvironmentConfigError(f"the option {option} of the reward {source} is {value!r}; set it to true or false")
    if group and per_turn:
        raise EnvironmentConfigError(f"the reward {source} is of a group and per_turn; set one of them to false")
    own_name: str = getattr(function, "__name__", type(function).__name__)
    return (
        name or own_name,
        RewardFunction(function, RewardMark(float(weight), group=bool(group), per_turn=bool(per_turn)), source),
        accuracy,
    )


def _check_parameters(function: Callable[..., Any], source: str) -> None:
    """Raise EnvironmentConfigError unless the function can be called with (task, rollout) and does not name other things."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise EnvironmentConfigError(f"the reward {source} takes {signature}: {error}; {CALLS}") from error
    if {"prompts", "completions"} & set(names) or "task" in names[1:] or names[0] in ("rollout", "rollouts"):
        raise EnvironmentConfigError(f"the reward {source} takes {signature}; {CALLS}. Rename its parameters")


def _choose_accuracy(functions: Mapping[str, RewardFunction], accuracies: Mapping[str, bool | None]) -> str | None:
    """Return the name of the reward that is the accuracy; None is the total reward."""
    marked = [name for name, accuracy in accuracies.items() if accuracy]
    if len(marked) > 1:
        raise EnvironmentConfigError(f"{' and '.join(marked)} are marked as the accuracy; at most one can be")
    open_to_choice = [name for name, accuracy in accuracies.items() if accuracy is None]
    bools = [name for name in open_to_choice if _returns_bool(functions[name].function)]
    for names in (marked, bools, open_to_choice if len(functions) == 1 else []):
        if len(names) == 1:
            return names[0]
    return None


def _returns_bool(function: Callable[..., Any]) -> bool:
    annotation = inspect.signature(function).return_annotation
    return annotation is bool or annotation in ("bool", "list[bool]", "Sequence[bool]", list[bool])
