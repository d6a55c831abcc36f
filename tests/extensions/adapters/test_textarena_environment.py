"""TextArena's games: alone, and against opponents."""

from __future__ import annotations

import asyncio
import random
import re

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.environments.registry import make_environment
from strop.extensions.adapters.textarena_environment import play_listed_move
from support.adapter_episodes import episode, play

pytest.importorskip("textarena")


class Bisect:
    """Plays GuessTheNumber as well as it can be played."""

    def __init__(self) -> None:
        self.low, self.high, self.guess = 1, 20, 0

    def __call__(self, observation: str) -> str:
        if "higher." in observation:
            self.low = self.guess + 1
        elif "lower." in observation:
            self.high = self.guess - 1
        self.guess = (self.low + self.high) // 2
        return f"I try [{self.guess}]"


def test_a_guessing_game_is_won_by_bisection_and_its_hints_are_told_once():
    environment = make_environment("textarena", {"id": "GuessTheNumber-v0"})
    for index in range(4):
        seen, result = play(environment, Bisect(), index=index)
        assert seen[0].startswith("You are Player 0. You are playing Guess The Number.") and seen[-1] is None
        assert set(seen[1:-1]) <= {"The target number is higher.", "The target number is lower."}
        assert result.rewards == {"score": 1.0, "solved": 1.0} and len(seen) <= 6
        assert len(result.step_rewards) == 1, "only the turn that ends the game has a reward"


def test_the_loop_of_textarenas_documentation_and_an_episode_see_the_same():
    """Its loop as it stands there, with a scripted agent."""
    import textarena as ta

    environment = make_environment("textarena", {"id": "GuessTheNumber-v0", "observation": "whole"})
    seen, result = play(environment, Bisect(), index=3)
    task = environment.tasks(DataSource(size=100, seed=1))[3]
    agents = {0: Bisect()}
    env = ta.make("GuessTheNumber-v0")
    env.reset(num_players=len(agents), seed=task.seed)
    done, observations = False, []
    while not done:
        _, observation = env.get_observation()
        observations.append(observation)
        action = agents[0](observation)
        done, _ = env.step(action=action)
    rewards, _ = env.close()
    assert rewards[0] == result.reward and observations == seen[:-1]


def test_a_game_does_not_depend_on_the_games_beside_it_nor_on_the_random_numbers_of_the_process():
    environment = make_environment("textarena", {"id": "TicTacToe-v0", "num_players": 2})

    def first_free(observation: str) -> str:
        return re.findall(r"\[\d\]", observation.splitlines()[-1])[0]

    async def together() -> list[object]:
        return await asyncio.gather(*(episode(environment, first_free, index=index) for index in range(6)))

    alone = [play(environment, first_free, index=index) for index in range(6)]
    random.seed(99)
    state = random.getstate()
    assert asyncio.run(together()) == alone
    assert random.getstate() == state, "the random numbers of the process are where they were"


@pytest.mark.parametrize("game", ["TicTacToe-v0", "TicTacToe-v0-train", "KuhnPoker-v0", "ConnectFour-v0", "SimpleNegotiation-v0"])
def test_two_player_games_are_played_to_their_end_against_the_random_opponent_from_both_sides(game):
    environment = make_environment("textarena", {"id": game, "num_players": 2})
    numbers = random.Random(1)
    for index in range(2):
        seen, result = play(environment, lambda observation: play_listed_move(observation, numbers), index=index, turns=60)
        assert f"You are Player {index}" in seen[0] or f"Player {index}" in seen[0]
        assert seen[-1] is None and result.reward in (-1.0, 0.0, 1.0) and result.metrics["over"] == 1.0


def test_a_scripted_opponent_is_a_function_of_the_users(tmp_path):
    (tmp_path / "row.py").write_text(
        "def top_row(observation, random):\n    free = observation.rsplit('Available Moves:', 1)[-1]\n"
        "    return next(move for move in ('[0]', '[1]', '[2]') if move in free)\n"
    )
    options = {"id": "TicTacToe-v0", "num_players": 2, "player": 1, "opponent": f"{tmp_path}/row.py:top_row"}
    seen, result = play(make_environment("textarena", options), ["[6]", "[7]"])
    assert "[Player 0] [0]" in seen[0] and seen[-1] is None
    assert result.rewards == {"score": -1.0, "solved": 0.0}


def test_an_opponent_that_knows_no_move_is_an_error_of_the_rollout_that_says_what_to_set(tmp_path):
    environment = make_environment("textarena", {"id": "TicTacToe-v0", "num_players": 2, "player": 1})
    with pytest.raises(RuntimeError, match="set opponent to"):
        play_listed_move("Say something.", random.Random(0))
    (tmp_path / "fool.py").write_text("def fool(observation, random):\n    return 'hm'\n")
    environment = make_environment(
        "textarena", {"id": "TicTacToe-v0", "num_players": 2, "player": 0, "opponent": f"{tmp_path}/fool.py:fool"}
    )
    _, result = play(environment, ["[0]"])
    assert result.reward == 1.0, "TextArena makes who moves invalidly twice the loser"


def test_invalid_moves_are_told_and_counted():
    environment = make_environment("textarena", {"id": "GuessTheNumber-v0"})
    seen, result = play(environment, ["hello there", "[99]"])
    assert "invalid move" in seen[1] and seen[-1] is None
    assert result.metrics == {"over": 1.0, "invalid_actions": 2.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "GuessTheNumbr-v0"}, "did you mean 'GuessTheNumber-v0'"),
        ({"id": "TicTacToe-v0"}, "refuses num_players=1"),
        ({"id": "GuessTheNumber-v0", "kwargs": {"speed": 2}}, "cannot make"),
        ({"id": "TicTacToe-v0", "num_players": 2, "player": 2}, "set it to 0 to 1"),
    ],
)
def test_what_textarena_does_not_have_is_an_error_at_the_start(options, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        make_environment("textarena", options)
