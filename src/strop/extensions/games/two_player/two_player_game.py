"""The interface of a game for two players who move in turn and see everything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar

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
