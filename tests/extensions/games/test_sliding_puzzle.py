"""The sliding puzzle: boards, moves and words as in NeMo-RL, and what training needs of it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.environments.registry import make_environment
from strop.extensions.games.sliding_puzzle import (
    DIRECTIONS,
    Grid,
    PuzzleTask,
    SlidingPuzzle,
    find_empty,
    make_move,
    render,
    solution,
    write_prompt,
)
from strop.types import Rollout
from support.games import ScriptedGenerator, played, run_script, see

GRID: Grid = ((1, 2, 3), (4, 5, 6), (7, 0, 8))
TASK = PuzzleTask(id="puzzle", question=write_prompt(GRID), grid=GRID)


def puzzle(*, size: int = 3, shuffle_moves: int = 10, max_moves: int = 30, **options: Any) -> SlidingPuzzle:
    rules = {"game_config": {"size": size, "shuffle_moves": shuffle_moves}, "max_moves": max_moves}
    made = make_environment("sliding_puzzle_game", {"cfg": rules, **options})
    assert isinstance(made, SlidingPuzzle)
    return made


def solve(grid: Grid) -> list[str]:
    """The shortest solution, by breadth-first search."""
    ways: dict[Grid, list[str]] = {grid: []}
    queue = deque([grid])
    while queue:
        at = queue.popleft()
        if at == solution(len(grid)):
            return ways[at]
        for action in DIRECTIONS:
            after, _ = make_move(at, action)
            if after not in ways:
                ways[after] = [*ways[at], action]
                queue.append(after)
    raise AssertionError(f"{grid} cannot be solved")


def test_every_puzzle_can_be_solved_in_as_many_moves_as_shuffled_it_and_none_is_solved_yet() -> None:
    for index in range(40):
        grid = puzzle(shuffle_moves=9).tasks(DataSource(size=100))[index].grid
        assert 1 <= len(solve(grid)) <= 9 and len(solve(grid)) % 2 == 1


def test_larger_puzzles_have_the_parity_of_those_that_can_be_solved() -> None:
    sizes = set()
    for index in range(200):
        grid = puzzle(size=5, shuffle_moves=30).tasks(DataSource(size=1000))[index].grid
        row, column = find_empty(grid)
        tiles = [tile or len(grid) ** 2 for tiles in grid for tile in tiles]
        inversions = sum(left > right for left, right in combinations(tiles, 2))
        assert (inversions + row + column) % 2 == (2 * (len(grid) - 1)) % 2, "every move changes both"
        sizes.add(len(grid))
    assert sizes == {2, 3, 4, 5}


def test_a_task_is_the_same_whenever_it_is_asked_for_and_seeds_and_splits_differ() -> None:
    data = DataSource(size=300, seed=3)
    first, again = puzzle().tasks(data), puzzle().tasks(data)
    assert [first[i] for i in (5, 0, 299)] == [again[i] for i in (5, 0, 299)]
    other = puzzle().tasks(DataSource(size=300, seed=4))
    assert [first[i] for i in range(9)] != [other[i] for i in range(9)]
    held_out = puzzle().tasks(replace(data, part="validation"))
    assert not {task.id for task in first} & {task.id for task in held_out}  # type: ignore[attr-defined]


def test_the_board_is_drawn_as_in_nemo_rl() -> None:
    wanted = "\n\n  +---------+\n1 | 1  2  3 |\n2 | 4  5  6 |\n3 | 7     8 |\n  +---------+\n     1  2  3 "
    assert render(GRID) == wanted
    prompt = puzzle().prompt(TASK)[0].content
    assert prompt.startswith("\n===== SLIDING PUZZLE =====\nArrange the 3x3 grid by sliding tiles into the empty space.\n")
    assert f"Current Board State:\n{wanted}\n\nReach the goal state where numbers are ordered 1 through 8 with" in prompt
    assert prompt.endswith("output <action>view</action>\nThink carefully step-by-step before acting.\n")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<action>down</action>", "\nSlid tile 5 down.\n"),
        ("I think. <ACTION> slide 3 1 </Action>", "\nSlid tile 7 into the empty space.\n"),
        ("<action>up</action>", "\nCannot slide up.\n"),
        ("<action>slide 1 1</action>", "\nTile must be adjacent to the empty space.\n"),
        ("<action>slide 4 1</action>", "\nInvalid position. Row/column must be between 1 and 3.\n"),
        ("<action>slide one 1</action>", "\nInvalid input format. Use: slide row col\n"),
        ("<action>slide 1</action>", "\nInvalid input format. Use: slide row col\n"),
        ("<action>Up</action>", "\nUnknown command. Type 'help' to see available commands.\n"),
        ("<action>view</action>", f"\n{render(GRID)}\n\nViewing the board. No move made."),
        ("<action>up", f"\n{render(GRID)}\n\nInvalid response format no move made. Try <action></action> like this: "
         "<action>your_action</action>"),
        ("<action>left</action> or <action>down</action>", "\nSlid tile 5 down.\n"),
    ],
)  # fmt: skip
def test_each_action_is_answered_in_nemo_rls_words(text: str, answer: str) -> None:
    assert see(puzzle(), TASK, text) == f"<environment>{answer}</environment>\n"


def test_a_solved_puzzle_ends_the_episode_with_reward_1() -> None:
    rollout = played(puzzle(), TASK, "<action>left</action>")
    assert (rollout.reward, rollout.rewards["won"], len(rollout.policy_turns)) == (1.0, 1.0, 1)
    assert played(puzzle(), TASK, "<action>view</action>", "nonsense", "<action>left</action>").reward == 1.0


def test_an_episode_ends_with_its_last_move_and_looking_at_the_board_is_none() -> None:
    game = puzzle(max_moves=2)
    rollout = played(
        game, TASK, "<action>view</action>", "?", "<action>up</action>", "<action>down</action>", "<action>up</action>"
    )
    assert len(rollout.policy_turns) == 4 and rollout.reward == 0.0


def test_turns_are_compared_by_their_board_and_stop_at_the_end_of_an_action() -> None:
    game = puzzle()
    rollout = played(game, TASK, "<action>down</action>", "<action>up</action>", "<action>view</action>", "<action>left</action>")
    assert rollout.turn_states[0] == rollout.turn_states[2] == rollout.turn_states[3] != rollout.turn_states[1]
    assert game.stop_strings(TASK, rollout) == ("</action>",)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cfg": {"game_config": {"size": 1}}}, "from 2 to 10"),
        ({"cfg": {"game_config": {"shuffle_moves": 0}}}, "solved at once"),
        ({"cfg": {"max_moves": 0}}, "cfg.max_moves is 0"),
        ({"cfg": {"game_config": {"sise": 3}}}, "sise"),
        ({"held_out_fraction": 1.0}, "held_out_fraction is 1.0"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=said):
        make_environment("sliding_puzzle", options)


@pytest.mark.exhaustive
def test_whatever_a_model_writes_is_answered() -> None:
    random = Random(0)
    pieces = ["<action>", "</action>", "slide ", "up", "9" * 500, "\x00", "İ", "²", " ", "\n", "-1", "1e9", "{", "<ACTION>"]
    for _ in range(150):
        text = "".join(random.choice(pieces) for _ in range(random.randint(0, 8)))
        rollout: Rollout = played(puzzle(), TASK, text)
        assert rollout.error is None


def test_stop_strings_reach_the_engine_with_those_of_the_configuration() -> None:
    generator = ScriptedGenerator("<action>down</action>", "<action>left</action>")
    run_script(puzzle(), TASK, generator, stops=("###",))
    assert [sampling.stop_strings for _, sampling in generator.requests] == [("###", "</action>")] * 2
