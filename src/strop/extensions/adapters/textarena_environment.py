"""Any TextArena game by its id, alone or against an opponent. The only module that imports ``textarena``."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from threading import RLock
from typing import Any, Literal

import numpy as np

from strop.environments.base import EnvironmentConfigError, import_user_code
from strop.extensions.adapters.stepped_environment import SeededTask, SteppedAnswer, SteppedEnvironment
from strop.packages import install_command
from strop.sampling import mix_seed
from strop.user_code import suggest_names

Opponent = Callable[[str, random.Random], str]

OPPONENT_TRIES = 20  # moves that an opponent may try until one is legal


@dataclass(frozen=True, kw_only=True)
class TextArenaEnvironment(SteppedEnvironment):
    """A TextArena game. The reward is the game's own, in the turn that ends it."""

    id: str  # such as GuessTheNumber-v0, TicTacToe-v0-train
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # arguments of textarena.make
    num_players: int = 1
    # Who plays the other sides. random: one of the moves that the game lists in brackets; file.py:function(observation, random) -> text.
    opponent: str = "random"
    player: int | None = None  # the side of the policy; null: by turns over the tasks
    # What the policy reads in each turn. new: what was said since its last turn; whole: what the wrappers of the game show.
    observation: Literal["new", "whole"] = "new"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.player is not None and not 0 <= self.player < self.num_players:
            raise EnvironmentConfigError(
                f"player is {self.player}, but {self.num_players} play: set it to 0 to {self.num_players - 1}"
            )
        if self.opponent != "random" and ":" not in self.opponent:
            raise EnvironmentConfigError(
                f"opponent is {self.opponent!r}; set it to random, or to a function of (observation, random), as file.py:function"
            )
        if self.num_players > 1:
            self.move  # noqa: B018 what cannot be imported is an error when the run starts
        try:
            _TextArenaGame(self, self.make(), 0, 0).reset()
        except (AssertionError, IndexError, KeyError) as error:
            raise EnvironmentConfigError(f"{self.id} refuses num_players={self.num_players}: {error}") from error

    @property
    def game_name(self) -> str:
        return self.id

    def make(self) -> Any:
        """Make the game as TextArena does. Raises EnvironmentConfigError."""
        try:
            import textarena
            from textarena.envs.registration import ENV_REGISTRY
        except ImportError as error:
            raise EnvironmentConfigError(f"the environment textarena needs a package: {install_command('textarena')}") from error
        if self.id not in ENV_REGISTRY:
            raise EnvironmentConfigError(f"TextArena has no game {self.id!r}{suggest_names(self.id, ENV_REGISTRY)}")
        try:
            return textarena.make(self.id, **self.kwargs)
        except (TypeError, ValueError, ImportError, AssertionError) as error:
            raise EnvironmentConfigError(f"TextArena cannot make {self.id} with {dict(self.kwargs)}: {error}") from error

    async def open_game(self, task: SeededTask) -> _TextArenaGame:
        player = task.index % self.num_players if self.player is None else self.player
        return _TextArenaGame(self, self.make(), task.seed, player)

    @cached_property
    def move(self) -> Opponent:
        return play_listed_move if self.opponent == "random" else import_user_code(self.opponent)


class _TextArenaGame:
    """A TextArena game in an episode.

    TextArena draws from the random numbers of the process. Each game keeps its own state of them, so that it does not depend on
    other games.
    """

    def __init__(self, options: TextArenaEnvironment, game: Any, seed: int, player: int) -> None:
        self._options, self._game, self._seed, self._player = options, game, seed, player
        self._random = random.Random(mix_seed(seed, 1))
        self._numbers = _RandomState(seed)
        self._over = False

    def reset(self) -> None:
        with self._numbers.current():
            self._game.reset(num_players=self._options.num_players, seed=self._seed)

    async def start(self) -> str:
        self.reset()
        with self._numbers.current():
            return self._play_others()

    async def step(self, text: str) -> SteppedAnswer:
        with self._numbers.current():
            return self._step(text)

    def _step(self, text: str) -> SteppedAnswer:
        errors = self._error_count
        self._over, _ = self._game.step(action=text)
        invalid = self._error_count > errors
        observation = "" if self._over else self._play_others()
        if not self._over:
            return SteppedAnswer(observation, invalid=invalid)
        rewards, information = self._game.close()
        outcome = float((rewards or {}).get(self._player, 0.0))
        return SteppedAnswer("", outcome, True, invalid or bool(information.get(self._player, {}).get("invalid_move")))

    def _play_others(self) -> str:
        """Let the others move until it is the policy's turn or the game is over. Return what the policy reads."""
        while not self._over:
            player, observation = self._observe()
            if player == self._player:
                return observation
            self._over = self._move_opponent(observation)
        return ""

    def _move_opponent(self, observation: str) -> bool:
        for _ in range(OPPONENT_TRIES):
            errors = self._error_count
            over, _ = self._game.step(action=self._options.move(observation, self._random))
            if over or self._error_count <= errors:
                return bool(over)
            observation += self._observe()[1]  # what was wrong with the move
        raise RuntimeError(
            f"the opponent found no legal move in {self._options.id} in {OPPONENT_TRIES} tries; set opponent to a function of yours that "
            "knows the game"
        )

    def _observe(self) -> tuple[int, str]:
        if self._options.observation == "whole" and self._game.state.current_player_id == self._player:
            player, text = self._game.get_observation()
            return player, text if isinstance(text, str) else self._format(player, text)
        player, messages = _unwrap(self._game).get_observation()
        return player, self._format(player, messages)

    def _format(self, player: int, messages: Any) -> str:
        """Write messages as one text, without those of the player itself, which are in its conversation."""
        names = self._game.state.role_mapping
        lines = [(sender, message) for sender, message, *_ in messages if sender != player]
        texts = (message if sender < 0 else f"[{names.get(sender, f'Player {sender}')}] {message}" for sender, message in lines)
        return "\n".join(texts).strip() or "It is your turn."

    @property
    def _error_count(self) -> int:
        return int(getattr(self._game.state, "error_count", 0))

    async def close(self) -> None:
        return None


def _unwrap(game: Any) -> Any:
    while "env" in vars(game):
        game = game.env
    return game


class _RandomState:
    """The state of the process's random numbers as one game sees it."""

    _lock = RLock()

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the process's state. Only for calls that do not await."""
        with self._lock:
            python, numpy = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(python)
                np.random.set_state(numpy)


def play_listed_move(observation: str, numbers: random.Random) -> str:
    """Return one of the moves in brackets on the last line that has several, else on the last one that has any."""
    lines = [found for line in observation.splitlines() if (found := re.findall(r"\[[^\[\]]{1,40}\]", line))]
    several = [found for found in lines if len(set(found)) > 1]
    if not lines:
        raise RuntimeError(
            "the game lists no moves in brackets that a random opponent could choose from; set opponent to file.py:function, a function of "
            "(observation, random) that returns a move"
        )
    move: str = numbers.choice((several or lines)[-1])
    return move
