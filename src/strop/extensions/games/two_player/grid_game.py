"""Games of marks in a grid: who has some in a row wins. Tic-tac-toe, and Connect Four."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from strop.extensions.games.two_player.two_player_game import TwoPlayerGame

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
