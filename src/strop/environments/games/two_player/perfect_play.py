"""Perfect play by searching a whole game."""

from __future__ import annotations

from functools import cache
from typing import Any

from strop.environments.games.two_player.two_player_game import TwoPlayerGame


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
