"""Any Gymnasium environment by its id. The only module that imports ``gymnasium``."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from strop.environments.base import EnvironmentConfigError, import_user_code
from strop.extensions.adapters.gymnasium_spaces import InvalidAction, describe_observation, describe_space, parse_action
from strop.extensions.adapters.stepped_environment import SeededTask, SteppedAnswer, SteppedEnvironment
from strop.packages import install_command
from strop.user_code import suggest_names


@dataclass(frozen=True, kw_only=True)
class GymnasiumEnvironment(SteppedEnvironment):
    """A Gymnasium environment, played in text. Task i is the environment after ``reset(seed=...)`` with a seed of its own."""

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
    """A Gymnasium environment in an episode. Its steps run in a thread, so that a slow one blocks nobody."""

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
    """Return what a terminal would show, with [ ] around what has a background of its own: in FrozenLake, where the player is."""
    marked = re.sub(r"\x1b\[(?:4\d|10\d)m(.*?)\x1b\[0m", r"[\1]", text, flags=re.DOTALL)
    return re.sub(r"\x1b\[[\d;]*m", "", marked)
