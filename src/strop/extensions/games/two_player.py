"""Games against an opponent: random, perfect, the policy itself, or a model that is served.

A task is a position after a few random moves, and the policy plays the side that moves there. All rollouts of a group begin in the same
position on the same side, so their mean reward is a baseline for that position. Over the tasks both sides are played, and against itself
the policy is trained on both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from random import Random
from typing import Any, ClassVar, Generic, Literal, TypeVar

from strop.data.sources.source import DataSource
from strop.environments.base import (
    DEFAULT_NUM_TASKS,
    Environment,
    EnvironmentConfigError,
    GeneratedTasks,
    import_user_code,
    reward,
)
from strop.environments.policy_client import PastSelvesRule, get_policy
from strop.extensions.games.text_game import draw_split, read_tag
from strop.extensions.judges.llm_client import LlmClient, get_llm_client
from strop.extensions.judges.llm_endpoint import make_endpoint
from strop.sampling import mix_seed
from strop.types import Message, Messages, Rollout, Task, assistant, user
from strop.user_code import suggest_names

PositionT = TypeVar("PositionT")


class TwoPlayerGame(ABC, Generic[PositionT]):
    """Positions are values that can be hashed. Players are 0, who begins, and 1; moves are short texts."""

    rules: ClassVar[str]  # for the prompt
    players: ClassVar[tuple[str, str]] = ("the first player", "the second player")  # what each one is called
    solvable: ClassVar[bool] = True  # whether the whole game can be searched

    @abstractmethod
    def start(self) -> PositionT: ...

    @abstractmethod
    def to_move(self, position: PositionT) -> int: ...

    @abstractmethod
    def legal_moves(self, position: PositionT) -> Sequence[str]:
        """Return the moves in a fixed order; none when the game is over."""

    @abstractmethod
    def play(self, position: PositionT, move: str) -> PositionT:
        """Return the position after a legal move."""

    @abstractmethod
    def winner(self, position: PositionT) -> int | None:
        """Return who has won; None if the game has no winner (yet)."""

    @abstractmethod
    def draw(self, position: PositionT) -> str:
        """Draw the position as text."""


@cache
def value_of(game: TwoPlayerGame[Any], position: Any) -> int:
    """Return what a position is worth to who moves in it, if both play perfectly: 1 won, 0 drawn, -1 lost."""
    if (winner := game.winner(position)) is not None:
        return 1 if winner == game.to_move(position) else -1
    return max((_value_after(game, position, move) for move in game.legal_moves(position)), default=0)


def best_moves(game: TwoPlayerGame[Any], position: Any) -> list[str]:
    """Return all moves that keep the value of a position."""
    wanted = value_of(game, position)
    return [move for move in game.legal_moves(position) if _value_after(game, position, move) == wanted]


def _value_after(game: TwoPlayerGame[Any], position: Any, move: str) -> int:
    after = game.play(position, move)
    value = value_of(game, after)
    return value if game.to_move(after) == game.to_move(position) else -value


EMPTY = "."
Marks = tuple[str, ...]  # rows from the top


class GridGame(TwoPlayerGame[Marks]):
    """The players set X and O in turn."""

    players = ("X", "O")
    width: ClassVar[int]
    height: ClassVar[int]
    in_a_row: ClassVar[int]

    def start(self) -> Marks:
        return (EMPTY * self.width,) * self.height

    def to_move(self, position: Marks) -> int:
        marks = "".join(position)
        return int(marks.count("X") > marks.count("O"))

    def winner(self, position: Marks) -> int | None:
        for line in self._lines(position):
            for player, mark in enumerate(self.players):
                if mark * self.in_a_row in line:
                    return player
        return None

    def _lines(self, position: Marks) -> Iterator[str]:
        yield from position
        yield from ("".join(column) for column in zip(*position, strict=True))
        for shift in range(-self.height + 1, self.width):
            yield "".join(position[row][row + shift] for row in range(self.height) if 0 <= row + shift < self.width)
            back = shift + self.height - 1
            yield "".join(position[row][back - row] for row in range(self.height) if 0 <= back - row < self.width)

    def _set(self, position: Marks, row: int, column: int) -> Marks:
        line = position[row]
        marked = line[:column] + self.players[self.to_move(position)] + line[column + 1 :]
        return (*position[:row], marked, *position[row + 1 :])


class TicTacToe(GridGame):
    """Three in a row on three by three cells, a1 to c3."""

    rules = (
        "Tic-tac-toe: X and O take turns to mark a cell; three in a row, column or diagonal win. Columns are a to c, rows 1 to 3."
    )
    width = height = in_a_row = 3

    def legal_moves(self, position: Marks) -> Sequence[str]:
        if self.winner(position) is not None:
            return ()
        cells = ((row, column) for row in range(3) for column in range(3) if position[row][column] == EMPTY)
        return tuple(f"{'abc'[column]}{row + 1}" for row, column in cells)

    def play(self, position: Marks, move: str) -> Marks:
        return self._set(position, int(move[1]) - 1, "abc".index(move[0]))

    def draw(self, position: Marks) -> str:
        rows = (f"{number} {' '.join(row)}" for number, row in enumerate(position, start=1))
        return "\n".join(["  a b c", *rows])


class ConnectFour(GridGame):
    """Four in a row on seven columns of six; a disc falls to the lowest free cell."""

    rules = (
        "Connect Four: X and O take turns to drop a disc into a column, 1 to 7, where it falls to the lowest free cell; four in a row, "
        "column or diagonal win."
    )
    solvable = False
    width, height, in_a_row = 7, 6, 4

    def legal_moves(self, position: Marks) -> Sequence[str]:
        if self.winner(position) is not None:
            return ()
        return tuple(str(column + 1) for column, mark in enumerate(position[0]) if mark == EMPTY)

    def play(self, position: Marks, move: str) -> Marks:
        column = int(move) - 1
        row = max(row for row in range(self.height) if position[row][column] == EMPTY)
        return self._set(position, row, column)

    def draw(self, position: Marks) -> str:
        return "\n".join([" ".join(map(str, range(1, 8))), *(" ".join(row) for row in position)])


@dataclass(frozen=True)
class Heaps:
    stones: tuple[int, ...]
    player: int = 0


class Nim(TwoPlayerGame[Heaps]):
    rules = (
        "Nim: the players take turns to take any number of stones, at least one, from one heap; who takes the last stone wins."
    )

    def start(self) -> Heaps:
        return Heaps((3, 4, 5))

    def to_move(self, position: Heaps) -> int:
        return position.player

    def legal_moves(self, position: Heaps) -> Sequence[str]:
        heaps = enumerate(position.stones, start=1)
        return tuple(f"{heap}:{count}" for heap, stones in heaps for count in range(1, stones + 1))

    def play(self, position: Heaps, move: str) -> Heaps:
        heap, count = map(int, move.split(":"))
        stones = (left - count if place == heap else left for place, left in enumerate(position.stones, start=1))
        return Heaps(tuple(stones), 1 - position.player)

    def winner(self, position: Heaps) -> int | None:
        return None if any(position.stones) else 1 - position.player

    def draw(self, position: Heaps) -> str:
        heaps = (f"heap {heap}: {stones}" for heap, stones in enumerate(position.stones, start=1))
        return ", ".join(heaps) + " (a move is heap:stones, such as 1:2)"


GAMES: Mapping[str, type[TwoPlayerGame[Any]]] = {"tic_tac_toe": TicTacToe, "connect_four": ConnectFour, "nim": Nim}
STOP = "</move>"
OPPONENT = 1  # tells the seeds of the opponent from those of the policy


@dataclass(frozen=True, kw_only=True)
class PositionTask(Task):
    moves: tuple[str, ...]  # that lead to the position in which the policy begins


@dataclass
class Match:
    """A game that is being played."""

    position: Any
    side: int  # that the policy plays
    states: list[str] = field(default_factory=list)  # before each turn of the policy
    opponent: list[Message] = field(default_factory=list)  # the conversation of the other side
    illegal: int = 0  # answers of the policy that are no legal move
    forfeited: bool = False


_match: ContextVar[Match] = ContextVar("strop_match")


@dataclass(frozen=True, kw_only=True)
class TwoPlayer(Environment[PositionTask]):
    """The reward is 1 for a win, 0.5 for a draw and 0 for a loss or a game that was not finished."""

    game: str = "tic_tac_toe"  # tic_tac_toe, connect_four, nim, or module:Class
    opponent: Literal["random", "perfect", "self", "past", "endpoint"] = "random"  # self: the policy with its current weights
    snapshot_every: int = 10  # of opponent past: steps after which one more self is kept
    pool_size: int = 4  # of opponent past: how many are kept, the newest ones
    past_share: float = 1.0  # of opponent past: the share of groups that meet one of them; the others meet the current policy
    endpoint: Mapping[str, Any] = field(default_factory=dict)  # of opponent endpoint: base_url, model and limits
    opening_moves: int = 3  # random moves before the policy's first: from 0 to this
    max_illegal_moves: int = 0  # one more loses the game
    held_out_fraction: float = 0.0  # of all openings, reserved for validation with every seed

    def __post_init__(self) -> None:
        super().__post_init__()
        game = self._game  # an unknown one is an error now, not in each task
        if self.opponent == "perfect" and not game.solvable:
            raise EnvironmentConfigError(
                f"opponent is perfect, but {self.game} is too large to be searched; set it to random or self"
            )
        if self.opening_moves < 0 or self.max_illegal_moves < 0:
            raise EnvironmentConfigError(
                f"opening_moves is {self.opening_moves} and max_illegal_moves is {self.max_illegal_moves}; set both to at least 0"
            )
        if not 0 <= self.held_out_fraction < 1:
            raise EnvironmentConfigError(f"held_out_fraction is {self.held_out_fraction}; set it to at least 0 and below 1")
        self._check_past()
        if (self.opponent == "endpoint") != bool(self.endpoint):
            raise EnvironmentConfigError(f"opponent is {self.opponent}; set endpoint if, and only if, opponent is endpoint")
        if self.endpoint:
            make_endpoint(self.endpoint)

    def _check_past(self) -> None:
        for option, smallest in (("snapshot_every", 1), ("pool_size", 1)):
            if getattr(self, option) < smallest:
                raise EnvironmentConfigError(f"{option} is {getattr(self, option)}; set it to at least {smallest}")
        if not 0 < self.past_share <= 1:
            raise EnvironmentConfigError(f"past_share is {self.past_share}; set it above 0 and to at most 1, or opponent to self")
        changed = [
            name for name in ("snapshot_every", "pool_size", "past_share") if getattr(self, name) != getattr(TwoPlayer, name)
        ]
        if changed and self.opponent != "past":
            raise EnvironmentConfigError(f"opponent is {self.opponent}, and {changed[0]} is an option of past; leave it out")

    @property
    def past_selves(self) -> PastSelvesRule | None:
        if self.opponent != "past":
            return None
        return PastSelvesRule(snapshot_every=self.snapshot_every, pool_size=self.pool_size)

    @cached_property
    def _game(self) -> TwoPlayerGame[Any]:
        if self.game in GAMES:
            return GAMES[self.game]()
        if ":" not in self.game:
            raise EnvironmentConfigError(
                f"there is no game {self.game!r}{suggest_names(self.game, GAMES)}; name your own as module:Class"
            )
        kind = import_user_code(self.game)
        if not (isinstance(kind, type) and issubclass(kind, TwoPlayerGame)):
            raise EnvironmentConfigError(f"game is {self.game}, which is no subclass of {TwoPlayerGame.__module__}.TwoPlayerGame")
        return kind()

    @property
    def _client(self) -> LlmClient:
        return get_llm_client(make_endpoint(self.endpoint))

    def tasks(self, data: DataSource) -> Sequence[PositionTask]:
        return GeneratedTasks(data.size or DEFAULT_NUM_TASKS, draw_split(self._draw, data, self.held_out_fraction))

    def _draw(self, random: Random) -> PositionTask:
        """Draw an opening after which the game is not over."""
        while True:
            position, moves = self._game.start(), list[str]()
            for _ in range(random.randint(0, self.opening_moves)):
                if legal := self._game.legal_moves(position):
                    moves.append(random.choice(legal))
                    position = self._game.play(position, moves[-1])
            if self._game.legal_moves(position):
                return PositionTask(id=f"{self.game}:{' '.join(moves)}", moves=tuple(moves))

    def _position(self, task: PositionTask) -> Any:
        position = self._game.start()
        for move in task.moves:
            position = self._game.play(position, move)
        return position

    def prompt(self, task: PositionTask) -> Messages:
        position = self._position(task)
        return (self._introduce(position, self._game.to_move(position)),)

    def _introduce(self, position: Any, side: int) -> Message:
        legal = ", ".join(self._game.legal_moves(position))
        return user(
            f"{self._game.rules}\nYou are {self._game.players[side]}, and it is your move.\n\n{self._game.draw(position)}\n\n"
            f"Legal moves: {legal}\nWrite your move as <move>{self._game.legal_moves(position)[0]}</move>."
        )

    def _report(self, position: Any, move: str) -> Message:
        legal = ", ".join(self._game.legal_moves(position))
        return user(f"Your opponent plays {move}.\n\n{self._game.draw(position)}\n\nLegal moves: {legal}")

    def stop_strings(self, task: PositionTask, rollout: Rollout) -> Sequence[str]:
        return (STOP,)

    def session(self, task: PositionTask) -> AbstractAsyncContextManager[None]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[None]:
            position = self._position(task)
            token = _match.set(Match(position, self._game.to_move(position)))
            try:
                yield
            finally:
                _match.reset(token)

        return opened()

    async def respond(self, task: PositionTask, rollout: Rollout) -> Messages | None:
        match = _match.get()
        move = self._move_policy(match, rollout.content)
        if move is None:
            if match.forfeited:
                return None
            legal = ", ".join(self._game.legal_moves(match.position))
            return (user(f"That is not a legal move. Legal moves: {legal}"),)
        while self._game.legal_moves(match.position) and self._game.to_move(match.position) != match.side:
            reply = await self._move_opponent(match, move, rollout)
            match.position = self._game.play(match.position, reply)
        return (self._report(match.position, reply),) if self._game.legal_moves(match.position) else None

    def _move_policy(self, match: Match, text: str) -> str | None:
        """Play the policy's move. Return it, or None if it is not legal."""
        match.states.append(repr(match.position))
        move = (read_tag(text, "move") or "").lower()
        if move not in self._game.legal_moves(match.position):
            match.illegal += 1
            match.forfeited = match.illegal > self.max_illegal_moves
            return None
        match.position = self._game.play(match.position, move)
        return move

    async def _move_opponent(self, match: Match, last: str, rollout: Rollout) -> str:
        """Return the opponent's move. A model that answers with no legal move plays a random one, which is counted."""
        seed = mix_seed(rollout.seed, len(rollout.policy_turns), OPPONENT)
        random, legal = Random(seed), list(self._game.legal_moves(match.position))
        if self.opponent == "random":
            return random.choice(legal)
        if self.opponent == "perfect":
            return random.choice(best_moves(self._game, match.position))
        asked = self._report(match.position, last) if match.opponent else self._introduce(match.position, 1 - match.side)
        match.opponent.append(asked)
        text = await self._ask_model(match.opponent, seed, rollout)
        match.opponent.append(assistant(text))
        move = (read_tag(text, "move") or "").lower()
        known = move in legal
        counted = rollout.metrics.get("opponent_illegal_moves", 0.0)
        rollout.metrics["opponent_illegal_moves"] = counted + (not known)
        return move if known else random.choice(legal)

    async def _ask_model(self, messages: Messages, seed: int, rollout: Rollout) -> str:
        if self.opponent == "self":
            return await get_policy().complete(messages, seed=seed, stop_strings=(STOP,))
        if self.opponent == "past":
            model = get_policy().past(self.past_share)
            rollout.metrics["opponent_age"] = rollout.version - model.version
            return await model.complete(messages, seed=seed, stop_strings=(STOP,))
        return (await self._client.complete(messages, temperature=1.0, seed=seed % 2**31, sample=seed)).text

    def turn_states(self, task: PositionTask, rollout: Rollout) -> Sequence[str | None]:
        states = _match.get().states
        return [*states, *[None] * (len(rollout.policy_turns) - len(states))]  # a turn that was cut off made no move

    @reward(weight=1.0)
    def score(self, task: PositionTask, rollout: Rollout) -> float:
        match = _match.get()
        winner = self._game.winner(match.position)
        if match.forfeited or (winner is None and self._game.legal_moves(match.position)):
            return 0.0
        return 0.5 if winner is None else float(winner == match.side)

    @reward(weight=0.0, accuracy=True)
    def won(self, task: PositionTask, rollout: Rollout) -> bool:
        return not _match.get().forfeited and self._game.winner(_match.get().position) == _match.get().side

    @reward(weight=0.0)
    def illegal_moves(self, task: PositionTask, rollout: Rollout) -> int:
        return _match.get().illegal
