"""Any Gymnasium environment by its id. The only module that imports ``gymnasium``."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from strop.environments.answers import extract_last_tagged
from strop.environments.base import EnvironmentConfigError, import_user_code
from strop.extensions.adapters.stepped_environment import SeededTask, SteppedAnswer, SteppedEnvironment
from strop.packages import install_command
from strop.user_code import suggest_names


class InvalidAction(ValueError):
    """A text is no action of the environment. The message is told to the policy."""


def to_plain(value: Any) -> Any:
    """Return an element of a space as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(inner) for inner in value]
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    return round(value, 4) if isinstance(value, float) else value


def describe_observation(value: Any) -> str:
    plain = to_plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def describe_space(space: Any, names: Sequence[str] = ()) -> str:
    """Say in one sentence what an action looks like."""
    if names:
        return f"one of {', '.join(names)}"
    kind = type(space).__name__
    if kind == "Discrete":
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} of the characters {space.characters!r}"
    if kind in ("MultiDiscrete", "MultiBinary", "Box"):
        return f"a JSON list of shape {list(space.shape)}, {_bounds(space, kind)}"
    if kind == "Dict":
        return "a JSON object: " + "; ".join(f"{key!r}: {describe_space(inner)}" for key, inner in space.spaces.items())
    if kind == "Tuple":
        return "a JSON list: " + "; ".join(describe_space(inner) for inner in space.spaces)
    raise TypeError(kind)


def _bounds(space: Any, kind: str) -> str:
    if kind == "MultiBinary":
        return "of 0 and 1"
    if kind == "MultiDiscrete":
        return f"of whole numbers from {to_plain(space.start)} to {to_plain(space.start + space.nvec - 1)}"
    low, high = np.unique(space.low), np.unique(space.high)
    return f"of numbers from {_bound(low, space.low)} to {_bound(high, space.high)}"


def _bound(distinct: Any, bounds: Any) -> Any:
    return to_plain(distinct[0]) if len(distinct) == 1 else to_plain(bounds)


def parse_action(space: Any, text: str, names: Sequence[str] = ()) -> Any:
    """Return the action that a text asks for: in the last <action>...</action>, else the whole text. Raises InvalidAction."""
    tagged = extract_last_tagged(text, "action")
    given = text.strip() if tagged is None else tagged.strip()
    if type(space).__name__ == "Discrete":
        action: Any = _parse_choice(space, given, names)
    elif type(space).__name__ == "Text":
        action = given
    else:
        try:
            action = _from_plain(space, json.loads(given[-10_000:]))
        except (ValueError, TypeError, RecursionError, OverflowError, KeyError):
            action = None
    if action is None or not space.contains(action):
        raise InvalidAction(f"{given[:80]!r} is not an action. An action is {describe_space(space, names)}.")
    return action


def _parse_choice(space: Any, given: str, names: Sequence[str]) -> int | None:
    """Return the choice that is named last, by its name or its number."""
    choices = {name.lower(): space.start + index for index, name in enumerate(names)}
    choices |= {str(number): number for number in range(space.start, space.start + space.n)} if not names else {}
    words = sorted(map(re.escape, choices), key=len, reverse=True)
    found = re.findall(rf"(?<![\w-])(?:{'|'.join(words)})(?!\w|\.\d)", given[-10_000:].lower())
    return choices[found[-1]] if found else None


def _from_plain(space: Any, value: Any) -> Any:
    """Return a value of JSON as an element of a space."""
    kind = type(space).__name__
    if kind == "Dict":
        return {key: _from_plain(inner, value[key]) for key, inner in space.spaces.items()}
    if kind == "Tuple":
        return tuple(_from_plain(inner, item) for inner, item in zip(space.spaces, value, strict=True))
    if kind == "Discrete":
        return space.dtype.type(value) if isinstance(value, int) else None
    return value if kind == "Text" else np.asarray(value, dtype=space.dtype)


@dataclass(frozen=True, kw_only=True)
class GymnasiumEnvironment(SteppedEnvironment):
    """A Gymnasium environment, played in text. Task i is the environment after ``reset(seed=...)`` with its own seed."""

    id: str  # such as FrozenLake-v1, module:Name-v0 (imports the module, which registers it), or file.py:Class
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # arguments of gymnasium.make
    # What the policy is told at first; {actions} says what an action looks like. The first observation follows.
    instruction: str = "Play {id}. In each turn, write your action between <action> and </action>. An action is {actions}."
    actions: tuple[str, ...] = ()  # names of the choices of a Discrete space, in its order; () for their numbers
    render: bool = False  # show what render_mode="ansi" draws, in place of the observation
    describe: Any = ""  # function(observation, environment) -> text; "" for the observation as JSON
    parse: Any = ""  # function(text, environment) -> action, or ValueError, whose text the policy reads; "": by the space
    invalid_reward: float = 0.0  # of a turn without a valid action, after which the policy may try again

    def __post_init__(self) -> None:
        super().__post_init__()
        with closing(self.make()) as game:
            self._check_space(game.action_space)

    def _check_space(self, space: Any) -> None:
        if self.actions and len(self.actions) != getattr(space, "n", None):
            raise EnvironmentConfigError(
                f"actions names {len(self.actions)} choices, but the action space of {self.id} is {space}; give one name for each "
                "choice of a Discrete space, or none"
            )
        if not self.parse:
            try:
                describe_space(space, self.actions)
            except TypeError as error:
                raise EnvironmentConfigError(
                    f"actions of {self.id} are of {space}, and {error} has no text form here; set parse to a function(text, environment)"
                ) from error

    @property
    def game_name(self) -> str:
        return self.id

    @cached_property
    def default_solved_at(self) -> float | None:
        with closing(self.make()) as game:
            return None if game.spec is None else game.spec.reward_threshold

    def make(self) -> Any:
        """Make the environment as Gymnasium does. Raises EnvironmentConfigError."""
        try:
            import gymnasium
        except ImportError as error:
            raise EnvironmentConfigError(f"the environment gymnasium needs a package: {install_command('gymnasium')}") from error
        arguments = {**({"render_mode": "ansi"} if self.render else {}), **self.kwargs}
        try:
            if ".py:" in self.id:
                return import_user_code(self.id)(**arguments)
            return gymnasium.make(self.id, **arguments)
        except gymnasium.error.UnregisteredEnv as error:
            hint = suggest_names(self.id, gymnasium.registry)
            raise EnvironmentConfigError(f"Gymnasium has no environment {self.id!r}{hint}: {error}") from error
        except (gymnasium.error.Error, TypeError, ImportError, ValueError, AssertionError) as error:
            raise EnvironmentConfigError(f"Gymnasium cannot make {self.id} with {arguments}: {error}") from error

    async def open_game(self, task: SeededTask) -> _GymnasiumGame:
        return _GymnasiumGame(self, await asyncio.to_thread(self.make), task.seed)

    @cached_property
    def description(self) -> Any:
        return _import_function(self.describe)

    @cached_property
    def parser(self) -> Any:
        return _import_function(self.parse)


class _GymnasiumGame:
    """A Gymnasium environment in an episode. Its steps run in a thread, so that a slow one blocks no other episode."""

    def __init__(self, options: GymnasiumEnvironment, game: Any, seed: int) -> None:
        self._options, self._game, self._seed = options, game, seed

    async def start(self) -> str:
        observation, _ = await asyncio.to_thread(self._game.reset, seed=self._seed)
        actions = describe_space(self._game.action_space, self._options.actions) if self._options.parser is None else ""
        instruction = self._options.instruction.replace("{id}", self._options.id).replace("{actions}", actions)
        return f"{instruction}\n\n{self._describe(observation)}".strip()

    async def step(self, text: str) -> SteppedAnswer:
        try:
            action = self._parse(text)
        except ValueError as error:
            return SteppedAnswer(str(error), self._options.invalid_reward, invalid=True)
        observation, reward, terminated, truncated, _ = await asyncio.to_thread(self._game.step, action)
        over = bool(terminated or truncated)
        return SteppedAnswer("" if over else self._describe(observation), float(reward), over)

    async def close(self) -> None:
        await asyncio.to_thread(self._game.close)

    def _parse(self, text: str) -> Any:
        if self._options.parser is None:
            return parse_action(self._game.action_space, text, self._options.actions)
        action = self._options.parser(text, self._game)
        if not self._game.action_space.contains(action):
            raise InvalidAction(f"{action!r:.80} is not an action.")
        return action

    def _describe(self, observation: Any) -> str:
        if self._options.description is not None:
            return str(self._options.description(observation, self._game))
        return drop_colours(str(self._game.render())).strip("\n") if self._options.render else describe_observation(observation)


def _import_function(function: Any) -> Any:
    """Return a function that is given itself or by its name; "" is None."""
    return (import_user_code(function) if isinstance(function, str) else function) if function else None


def drop_colours(text: str) -> str:
    """Return what a terminal would show, with [ ] around what has its own background: in FrozenLake, where the player is."""
    marked = re.sub(r"\x1b\[(?:4\d|10\d)m(.*?)\x1b\[0m", r"[\1]", text, flags=re.DOTALL)
    return re.sub(r"\x1b\[[\d;]*m", "", marked)
