"""The sliding puzzle of NeMo-RL: the same prompt, actions, answers, options and reward.

A puzzle is shuffled from its solution by moves, so it can always be solved, and by an odd number of them, so it is never solved yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from strop.environments.base import EnvironmentConfigError
from strop.extensions.games.text_game import GameStep, TextGame, read_tag
from strop.types import Rollout, Task

Grid = tuple[tuple[int, ...], ...]  # 0 is the empty space

# The direction in which a tile slides -> where it is, relative to the empty space.
DIRECTIONS = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
STOP = "</action>"
MOST_SEARCHED = 20_000  # boards, for a solution


@dataclass(frozen=True, kw_only=True)
class PuzzleSize:
    """The largest puzzle; each one draws its own size and its own number of moves."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    size: int = 3  # rows and columns: from 2 to this
    shuffle_moves: int = 10  # random moves away from the solution: from 1 to this, one more where the number is even


@dataclass(frozen=True, kw_only=True)
class PuzzleRules:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    game_config: PuzzleSize = PuzzleSize()
    max_moves: int = 30  # an episode ends after this number of actions; looking at the board is none, an illegal move is one


@dataclass(frozen=True, kw_only=True)
class PuzzleTask(Task):
    grid: Grid


@dataclass(frozen=True)
class Board:
    grid: Grid
    moves: int = 0  # actions so far


@dataclass(frozen=True, kw_only=True)
class SlidingPuzzle(TextGame[PuzzleTask, Board]):
    """Slide tiles until they are in order. Each turn of the policy is one action, ``<action>up</action>``."""

    cfg: PuzzleRules = PuzzleRules()

    def __post_init__(self) -> None:
        super().__post_init__()
        size, shuffle = self.cfg.game_config.size, self.cfg.game_config.shuffle_moves
        if not 2 <= size <= 10:
            raise EnvironmentConfigError(f"cfg.game_config.size is {size}; a puzzle has from 2 to 10 rows and columns")
        if shuffle < 1:
            raise EnvironmentConfigError(f"cfg.game_config.shuffle_moves is {shuffle}; with fewer than 1 it is solved at once")
        if self.cfg.max_moves < 1:
            raise EnvironmentConfigError(f"cfg.max_moves is {self.cfg.max_moves}; nothing can be solved with fewer than 1")

    def make_task(self, random: Random) -> PuzzleTask:
        shuffle = random.randint(1, self.cfg.game_config.shuffle_moves)
        grid = shuffle_solution(random.randint(2, self.cfg.game_config.size), shuffle + 1 - shuffle % 2, random)
        name = "/".join(" ".join(map(str, row)) for row in grid)
        return PuzzleTask(id=f"sliding_puzzle:{name}", question=write_prompt(grid), grid=grid)

    def first_state(self, task: PuzzleTask) -> Board:
        return Board(task.grid)

    def describe_state(self, state: Board) -> str:
        """Return only the board: what can be reached from it hardly depends on the moves that were made."""
        return repr(state.grid)

    def stop_strings(self, task: PuzzleTask, rollout: Rollout) -> Sequence[str]:
        return (STOP,)

    def reference_turns(self, task: PuzzleTask) -> Sequence[str]:
        return [f"<action>{action}{STOP}" for action in solve(task.grid)]

    def step(self, task: PuzzleTask, state: Board, text: str) -> GameStep[Board]:
        action = read_tag(text, "action")
        if action is None:
            said = "Invalid response format no move made. Try <action></action> like this: <action>your_action</action>"
            return GameStep(state, f"<environment>\n{render(state.grid)}\n\n{said}</environment>\n")
        if action == "view":
            said = "Viewing the board. No move made."
            return GameStep(state, f"<environment>\n{render(state.grid)}\n\n{said}</environment>\n")
        grid, said = make_move(state.grid, action)
        solved = grid != state.grid and grid == solution(len(grid))
        said = "Congratulations! You've solved the puzzle!" if solved else said
        after = Board(grid, state.moves + 1)
        over = solved or after.moves >= self.cfg.max_moves
        return GameStep(after, f"<environment>\n{said}\n</environment>\n", over=over, won=solved)


def solution(size: int) -> Grid:
    return tuple(tuple((row * size + column + 1) % (size * size) for column in range(size)) for row in range(size))


def solve(grid: Grid) -> list[str]:
    """Return a shortest list of actions that solves a puzzle, none if it takes a longer search."""
    ways: dict[Grid, list[str]] = {grid: []}
    queue = deque([grid])
    while queue and len(ways) < MOST_SEARCHED:
        board = queue.popleft()
        for action in DIRECTIONS:
            after, _ = make_move(board, action)
            if after == solution(len(grid)):
                return [*ways[board], action]
            if after not in ways:
                ways[after] = [*ways[board], action]
                queue.append(after)
    return []


def find_empty(grid: Grid) -> tuple[int, int]:
    return next((row, tiles.index(0)) for row, tiles in enumerate(grid) if 0 in tiles)


def slide(grid: Grid, row: int, column: int) -> Grid:
    """Exchange the tile at (row, column) and the empty space."""
    empty = find_empty(grid)
    moved = [list(tiles) for tiles in grid]
    moved[empty[0]][empty[1]], moved[row][column] = grid[row][column], 0
    return tuple(map(tuple, moved))


def is_inside(grid: Grid, row: int, column: int) -> bool:
    return 0 <= row < len(grid) and 0 <= column < len(grid)


def shuffle_solution(size: int, moves: int, random: Random) -> Grid:
    grid = solution(size)
    for _ in range(moves):
        row, column = find_empty(grid)
        places = [(row + down, column + right) for down, right in DIRECTIONS.values()]
        grid = slide(grid, *random.choice([place for place in places if is_inside(grid, *place)]))
    return grid


def make_move(grid: Grid, action: str) -> tuple[Grid, str]:
    """Return the grid after an action, the same one if it is not possible, and what the player is told."""
    empty_row, empty_column = find_empty(grid)
    if action in DIRECTIONS:
        down, right = DIRECTIONS[action]
        row, column = empty_row + down, empty_column + right
        if not is_inside(grid, row, column):
            return grid, f"Cannot slide {action}."
        return slide(grid, row, column), f"Slid tile {grid[row][column]} {action}."
    if not action.startswith("slide "):
        return grid, "Unknown command. Type 'help' to see available commands."
    try:
        row, column = (int(word) - 1 for word in action.split()[1:])
    except ValueError:
        return grid, "Invalid input format. Use: slide row col"
    if not is_inside(grid, row, column):
        return grid, f"Invalid position. Row/column must be between 1 and {len(grid)}."
    if abs(row - empty_row) + abs(column - empty_column) != 1:
        return grid, "Tile must be adjacent to the empty space."
    return slide(grid, row, column), f"Slid tile {grid[row][column]} into the empty space."


def render(grid: Grid) -> str:
    """Draw the board with numbered rows and columns."""
    size = len(grid)
    digits = len(str(size * size - 1))
    border = "  +" + "-" * (digits + 2) * size + "+"
    rows = [
        f"{number} |" + "".join(f" {tile or '':>{digits}} " for tile in tiles) + "|" for number, tiles in enumerate(grid, start=1)
    ]
    labels = "    " + "".join(f"{column + 1:^{digits + 2}}" for column in range(size))
    return "\n".join(["\n", border, *rows, border, labels])


def write_prompt(grid: Grid) -> str:
    """Return the prompt, word for word that of NeMo-RL."""
    size = len(grid)
    return (
        "\n===== SLIDING PUZZLE =====\n"
        f"Arrange the {size}x{size} grid by sliding tiles into the empty space.\n"
        f"- The goal is to arrange numbers from 1 to {size * size - 1} in order\n"
        "- Use 'up', 'down', 'left', 'right' to slide in that direction\n"
        "- Use 'view' to see the current state of the board\n\n"
        f"Current Board State:\n{render(grid)}\n\n"
        f"Reach the goal state where numbers are ordered 1 through {size**2 - 1} "
        "with the empty space (0) at the bottom right.\n"
        "Valid actions: 'up', 'down', 'left', 'right', or 'slide row col' (e.g., 'slide 1 2').\n"
        "After thinking, output your chosen action on a new line starting with '<action></action>' like this:\n"
        "<action>your_action</action>\n"
        "If you just want to see the board, output <action>view</action>\n"
        "Think carefully step-by-step before acting.\n"
    )
