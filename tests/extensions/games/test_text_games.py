"""Number guessing, and text adventures that can always be won."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.extensions.games.text_adventure import AdventureState, TextAdventure, obey, solve
from strop.extensions.games.text_game import NumberGuessing, read_tag
from strop.types import Task
from support.each import each
from support.games import played, see

SECRET = Task(id="number_guessing:37", question="?", answer="37")


def test_a_guess_is_answered_and_the_right_one_wins() -> None:
    game = NumberGuessing()
    assert see(game, SECRET, "Perhaps 12, no: 50") == "Lower. Guess again."
    assert see(game, SECRET, "50", "25") == "Higher. Guess again."
    assert see(game, SECRET, "no idea") == "That is not a number. Guess again."
    assert played(game, SECRET, "50", "25", "37").reward == 1.0
    lost = played(game, SECRET, *["1"] * 9)
    assert (lost.reward, len(lost.policy_turns)) == (0.0, 7)


def test_a_state_of_number_guessing_is_what_is_known() -> None:
    states = played(NumberGuessing(), SECRET, "50", "25", "30").turn_states
    assert states[2] == "GuessingState(lowest=26, highest=49, guesses=2)"


def test_halving_finds_every_number() -> None:
    game = NumberGuessing(highest=100, max_guesses=7)
    for secret in range(1, 101):
        task, state = Task(id="", answer=str(secret)), game.first_state(SECRET)
        for _ in range(7):
            step = game.step(task, state, str((state.lowest + state.highest) // 2))
            state = step.state
            if step.won:
                break
        assert step.won


def test_numbers_of_training_and_validation_never_meet_and_too_few_games_are_an_error() -> None:
    data = DataSource(size=50)
    sides = [{task.answer for task in NumberGuessing().tasks(part)} for part in (data, replace(data, part="validation"))]  # type: ignore[attr-defined]
    assert sides[1] and not sides[0] & sides[1]
    with pytest.raises(DataError, match="held_out_fraction"):
        NumberGuessing(highest=2, held_out_fraction=0.999).tasks(data)[0]


@each("seed", range(4), ids=[f"houses {seed}" for seed in range(4)])
@pytest.mark.parametrize(("rooms", "locks"), [(2, 0), (4, 1), (6, 2), (9, 3)])
def test_every_adventure_can_be_won_by_its_solver_and_by_playing_its_solution(rooms: int, locks: int, seed: int) -> None:
    game = TextAdventure(rooms=rooms, locks=locks, max_turns=60)
    task = game.make_task(Random(seed))
    way = solve(task.house)
    assert task.answer == ", ".join(way) and len(task.house.locks) <= locks
    rollout = played(game, task, *way)
    assert rollout.reward == 1.0 and len(rollout.policy_turns) == len(way)
    assert rollout.rewards["points"] == len(task.house.locks) * 2 + 1, "each key, each door and the treasure, once"


def test_locks_are_on_the_way_so_that_no_key_can_be_left_out() -> None:
    for seed in range(20):
        house = TextAdventure(rooms=6, locks=1, max_turns=60).make_task(Random(seed)).house
        colour = next(iter(house.locks.values()))
        with pytest.raises(ValueError, match="cannot be won"):
            solve(replace(house, items={item: place for item, place in house.items.items() if item != f"{colour} key"}))


def test_an_adventure_is_the_same_whenever_it_is_asked_for() -> None:
    first, again = (TextAdventure().tasks(DataSource(size=20, seed=5)) for _ in range(2))
    assert [first[i] for i in (7, 0)] == [again[i] for i in (7, 0)]
    assert len({task.id for task in first}) == 20  # type: ignore[attr-defined]


def test_what_cannot_be_done_is_said_and_changes_nothing() -> None:
    house = TextAdventure(rooms=6, locks=2, max_turns=60).make_task(Random(1)).house
    state = AdventureState(house.start)
    for command in ("go up", "take moon", "unlock", "", "\x00", "go", "take", "unlock nowhere", "dance" * 1000):
        assert obey(house, state, command)[0] == state
    assert obey(house, state, "inventory")[1] == "You carry: nothing."


def test_turns_of_an_adventure_are_limited_and_options_are_checked() -> None:
    game = TextAdventure(rooms=2, locks=0, max_turns=4)
    rollout = played(game, game.make_task(Random(0)), *["look"] * 9)
    assert len(rollout.policy_turns) == 4 and len(set(rollout.turn_states)) == 1
    wrong: dict[str, Any]
    for wrong in ({"rooms": 1}, {"rooms": 3, "locks": 3}, {"max_turns": 0}):
        with pytest.raises(EnvironmentConfigError):
            TextAdventure(**wrong)
    with pytest.raises(EnvironmentConfigError, match="raise max_turns"):
        TextAdventure(rooms=12, locks=4, max_turns=1).make_task(Random(0))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<a>x</a>", "x"), ("<A> y </a> z", "y"), ("<a>1</a><a>2</a>", "2"), ("<a>open", None), ("a", None), ("</a><a>", None),
        ("İ<a>x</a>", "x"), ("<a></a>", ""),
    ],
)  # fmt: skip
def test_the_last_tag_is_read(text: str, found: str | None) -> None:
    assert read_tag(text, "a") == found
