"""Plain functions and verifiers as rewards: rows of a dataset, answered in one turn and scored by functions of (task, rollout).

def correct(task, rollout):             # a number or a bool, for each rollout
    return task.answer in rollout.text

def shortest(task, rollouts):           # one for each rollout of the prompt, all at once
    return [rollout.sampled_tokens == min(each.sampled_tokens for each in rollouts) for rollout in rollouts]
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from strop.data.sources.source import DataSource
from strop.environments.base import DatasetEnvironment, Environment, EnvironmentConfigError, PromptedTask, import_user_code
from strop.environments.rewards import RewardFunction, RewardMark, takes_rollouts
from strop.environments.verifier_registry import VerifierReward, make_verifier
from strop.environments.verifiers.base import Verifier
from strop.environments.verifiers.mark_options import MARK_OPTIONS, order_by_gates, read_mark
from strop.types import Rollout
from strop.user_code import suggest_names

OPTIONS = ("function", "thread", *MARK_OPTIONS)
CALLS = (
    "a reward is called with (task, rollout), or with (task, rollouts), all rollouts of a prompt: rollout.text is the completion, "
    "task.answer the reference answer, task.metadata the row"
)


@dataclass(frozen=True, kw_only=True)
class FunctionEnvironment(DatasetEnvironment):
    """Scores with functions, which may be async, and with verifiers. Each is a Python function, ``file.py:name``, ``module:name``, or a
    mapping of ``function`` or ``verifier`` with ``weight`` (default 1), ``gate``, ``accuracy``, ``group`` and ``per_turn``, as in
    ``strop.environments.base.reward``; all other keys are options of the verifier.

    Evaluation reports as accuracy the reward with ``accuracy: true``, else the only one annotated to return bool (or the only
    verifier of correctness), else the only reward, else the total.
    """

    reward: Any = None  # one function
    rewards: Any = None  # several: a list of functions, logged by their own names, or a mapping of names to functions

    @cached_property
    def reward_functions(self) -> Mapping[str, RewardFunction]:
        functions: dict[str, RewardFunction] = {}
        accuracies: dict[str, bool | None] = {}
        for name, function, accuracy in self._made:
            if name in functions:
                raise EnvironmentConfigError(f"two rewards are named {name!r}; set rewards to a mapping of names to functions")
            functions[name], accuracies[name] = function, accuracy
        chosen = _choose_accuracy(functions, accuracies)
        marked = {name: replace(each, mark=replace(each.mark, accuracy=name == chosen)) for name, each in functions.items()}
        return {name: marked[name] for name in order_by_gates(marked)}

    @cached_property
    def _made(self) -> list[tuple[str, RewardFunction, bool | None]]:
        return [_make_reward(key, given) for key, given in self._list_given()]

    @property
    def declares_accuracy(self) -> bool:
        return any(accuracy or (accuracy is None and _says_right_or_wrong(each.function)) for _, each, accuracy in self._made)

    @property
    def needs_answers(self) -> bool:
        return any(each.verifier.needs_answer for each in self._verifiers)

    def tasks(self, data: DataSource) -> Sequence[PromptedTask]:
        """Also load what the verifiers need, so that a wrong model, key or column raises EnvironmentConfigError at the start of
        the run.
        """
        for each in self._verifiers:
            each.verifier.prepare()
        tasks = super().tasks(data)
        for each in self._verifiers if tasks else ():
            each.verifier.check_task(tasks[0])
        return tasks

    def answer_key(self, task: PromptedTask, rollout: Rollout) -> str | None:
        for each in self.reward_functions.values():
            if each.mark.accuracy and isinstance(each.function, VerifierReward):
                return each.function.find_answer(rollout)
        return None

    @property
    def _verifiers(self) -> list[VerifierReward]:
        return [each.function for each in self.reward_functions.values() if isinstance(each.function, VerifierReward)]

    @classmethod
    def list_marks(cls, options: Mapping[str, Any]) -> Mapping[str, RewardMark]:
        made = cls(**{name: options[name] for name in ("reward", "rewards") if name in options})
        return {name: each.mark for name, each in made.reward_functions.items()}

    def _list_given(self) -> Iterator[tuple[str | None, Any]]:
        """Yield (name, configured value) of every reward; the name is None if the function's own name is used."""
        if self.reward is not None and self.rewards is not None:
            raise EnvironmentConfigError("reward and rewards are both set; keep one")
        given = self.reward if self.rewards is None else self.rewards
        if not given:
            raise EnvironmentConfigError(
                "there is no reward; set reward to a function, as file.py:name or module:name, or rewards to several of them"
            )
        if isinstance(given, list | tuple):
            yield from ((None, each) for each in given)
        elif isinstance(given, Mapping) and not {"function", "verifier"} & set(given):
            yield from given.items()
        else:
            yield None, given


def _make_reward(name: str | None, given: Any) -> tuple[str, RewardFunction, bool | None]:
    """Return a reward's name, its function, and whether it is the accuracy (None: not specified). Raises EnvironmentConfigError."""
    options = given if isinstance(given, Mapping) else {"function": given}
    if "verifier" in options:
        own_name, function, source, mark = _find_verifier(name, options)
    else:
        own_name, function, source, mark = _find_function(name, options)
    made, accuracy = read_mark(options, mark, (name or own_name) if "verifier" in options else source)
    return name or own_name, RewardFunction(function, made, source), accuracy


def _find_verifier(name: str | None, options: Mapping[str, Any]) -> tuple[str, Callable[..., Any], str, RewardMark]:
    if "function" in options:
        raise EnvironmentConfigError(f"the reward {name} has a function and a verifier; keep one")
    kind, where = options["verifier"], "the reward" if name is None else f"the reward {name}"
    rest = {option: value for option, value in options.items() if option != "verifier" and option not in MARK_OPTIONS}
    try:
        verifier = make_verifier(kind, rest, others=MARK_OPTIONS)
    except EnvironmentConfigError as error:
        raise EnvironmentConfigError(f"{where}: {error}") from error
    per_turn = options.get("per_turn", False)
    if verifier.compares and (per_turn or options.get("group") is False):
        raise EnvironmentConfigError(
            f"{where}: the verifier {kind} compares the rollouts of a task; leave group and per_turn out"
        )
    if not verifier.compares and options.get("group"):
        raise EnvironmentConfigError(f"{where}: the verifier {kind} reads one rollout; leave group out")
    own_name = kind.rpartition(":")[2]
    function = VerifierReward(name or own_name, verifier, bool(per_turn))
    return own_name, function, f"the verifier {kind}", RewardMark(group=verifier.compares, log_weighted=True, concurrent=True)


def _find_function(name: str | None, options: Mapping[str, Any]) -> tuple[str, Callable[..., Any], str, RewardMark]:
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
    if isinstance(function, type) and issubclass(function, Verifier):
        raise EnvironmentConfigError(f"the reward {source} is a verifier; write {{verifier: {source}}} in its place")
    if not callable(function) or isinstance(function, type):
        raise EnvironmentConfigError(f"the reward {source} is {function!r:.80}, not a function; {CALLS}")
    _check_parameters(function, source)
    own_name: str = getattr(function, "__name__", type(function).__name__)
    mark = getattr(function, "__reward__", None) or RewardMark(group=takes_rollouts(function))
    return own_name, _in_thread(function) if options.get("thread") is True else function, source, mark


def _in_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a coroutine function that calls a plain one in a thread, so that a slow reward does not block others."""

    @functools.wraps(function)
    async def call(task: Any, rollouts: Any) -> Any:
        return await asyncio.to_thread(function, task, rollouts)

    return call


def _check_parameters(function: Callable[..., Any], source: str) -> None:
    """Raise EnvironmentConfigError unless the function can be called with (task, rollout) and has no other required parameters."""
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
    bools = [name for name in open_to_choice if _says_right_or_wrong(functions[name].function)]
    for names in (marked, bools, open_to_choice if len(functions) == 1 else []):
        if len(names) == 1:
            return names[0]
    return None


def _says_right_or_wrong(function: Callable[..., Any]) -> bool:
    if isinstance(function, VerifierReward):
        return function.verifier.is_accuracy
    annotation = inspect.signature(function).return_annotation
    return annotation is bool or annotation in ("bool", "list[bool]", "Sequence[bool]", list[bool])
