"""Nim: heaps of stones, and who takes the last one wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.extensions.games.two_player.two_player_game import TwoPlayerGame


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
