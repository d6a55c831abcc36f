"""Games for two: rules, perfect play, opponents, and the policy against itself."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.environments.policy_client import NoPolicyError, get_policy
from strop.environments.remote import EnvironmentDescription, connect
from strop.extensions.games.two_player import ConnectFour, Heaps, Nim, PositionTask, TicTacToe, TwoPlayer, best_moves, value_of
from strop.generation.base import PastSelf
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, run_group
from strop.sampling import Sampling
from strop.types import Group, Task
from support.environment_servers import EnvironmentServerThread, handle_of
from support.games import ScriptedGenerator, played, run_script
from support.llm_server import llm_server

START = PositionTask(id="start", moves=())
X_WINS = PositionTask(id="x wins", moves=("a1", "a2", "b1", "b2"))  # X to move: c1 wins


def says(*moves: str) -> list[str]:
    return [f"<move>{move}</move>" for move in moves]


def play_group(
    environment: Any, task: Task, generator: ScriptedGenerator, *, samples: int = 1, seed: int = 0, past: Any = None
) -> Group:
    return asyncio.run(
        run_group(
            0, "game", handle_of(environment), task, samples=samples, generator=generator,
            template=ChatTemplate(generator.tokenizer),
            sampling=Sampling(max_new_tokens=50), rules=EpisodeRules(max_turns=9, max_length=100_000), seed=seed, past=past,
        )
    )  # fmt: skip


def test_values_of_positions_are_those_that_are_known() -> None:
    game, nim = TicTacToe(), Nim()
    assert value_of(game, game.start()) == 0
    assert value_of(game, game.play(game.play(game.start(), "b2"), "b1")) == 1, "an edge loses to the centre"
    for stones in [(3, 4, 5), (1, 2, 3), (2, 2, 0), (1, 0, 0), (5, 1, 4)]:
        assert value_of(nim, Heaps(stones)) == (1 if stones[0] ^ stones[1] ^ stones[2] else -1), "Bouton's theorem"


def test_best_moves_win_at_once_where_they_can() -> None:
    game, position = TicTacToe(), TicTacToe().start()
    for move in X_WINS.moves:
        position = game.play(position, move)
    assert "c1" in best_moves(game, position) and "c3" not in best_moves(game, position)


def test_a_row_a_column_and_both_diagonals_win_connect_four() -> None:
    for moves in ("1122334", "1212121", "12234334544", "76654554344"):
        game, position = ConnectFour(), ConnectFour().start()
        for move in moves:
            assert game.winner(position) is None
            position = game.play(position, move)
        assert game.winner(position) == 0 and game.legal_moves(position) == (), moves


@pytest.mark.parametrize("game", ["tic_tac_toe", "connect_four", "nim"])
def test_random_games_end_and_have_legal_moves_until_then(game: str) -> None:
    rules, random = TwoPlayer(game=game)._game, Random(0)
    for _ in range(30):
        position, moves = rules.start(), 0
        while legal := rules.legal_moves(position):
            assert rules.winner(position) is None
            position, moves = rules.play(position, random.choice(legal)), moves + 1
        assert 1 <= moves <= 42


def test_both_sides_are_played_over_the_tasks_and_a_group_begins_in_one_position() -> None:
    tasks = TwoPlayer().tasks(DataSource(size=60, seed=1))
    assert {len(task.moves) % 2 for task in tasks} == {0, 1}
    assert [tasks[i].moves for i in range(9)] == [TwoPlayer().tasks(DataSource(size=60, seed=1))[i].moves for i in range(9)]
    group = play_group(TwoPlayer(), tasks[3], ScriptedGenerator(), samples=3)
    assert len({tuple(rollout.prompt.tolist()) for rollout in group.rollouts}) == 1


def test_a_win_is_1_an_illegal_move_loses_and_unless_one_is_allowed_is_said() -> None:
    won = played(TwoPlayer(), X_WINS, *says("c1"))
    assert (won.reward, won.rewards["won"]) == (1.0, 1.0)
    lost = played(TwoPlayer(), X_WINS, *says("a1", "c1"))
    assert (lost.reward, len(lost.policy_turns), lost.rewards["illegal_moves"]) == (0.0, 1, 1.0)
    again = played(TwoPlayer(max_illegal_moves=1), X_WINS, *says("a1", "c1"))
    assert again.reward == 1.0 and "not a legal move" in again.messages[-2].content
    assert again.turn_states[0] == again.turn_states[1]


def test_nobody_wins_against_perfect_play() -> None:
    for seed in range(12):
        random, game = Random(seed), TicTacToe()
        moves = [random.choice(["a1", "b2", "c3", "a3", "c1", "b1", "a2", "c2", "b3"]) for _ in range(9)]
        rollout = played(TwoPlayer(opponent="perfect", max_illegal_moves=99), START, *says(*moves))
        assert rollout.rewards["won"] == 0.0
    assert game.legal_moves(game.start())


def test_a_random_opponent_plays_the_same_game_for_the_same_seed() -> None:
    script = says("a1", "b2", "c3", "a2", "b1", "c1")
    games = [play_group(TwoPlayer(max_illegal_moves=9), START, ScriptedGenerator(*script), seed=seed) for seed in (1, 1, 2)]
    first, again, other = ([message.content for message in game.rollouts[0].messages] for game in games)
    assert first == again != other


def test_the_policy_plays_itself_in_the_words_of_the_other_side() -> None:
    generator = ScriptedGenerator(*says("a1", "b2", "b1", "c3", "c1"))
    group = play_group(TwoPlayer(opponent="self"), START, generator)
    (rollout,) = group.rollouts
    assert rollout.error is None and (rollout.reward, len(rollout.policy_turns)) == (1.0, 3)
    assert rollout.metrics["opponent_illegal_moves"] == 0.0
    asked = [prompt for prompt, _ in generator.requests]
    assert "You are X" in asked[0] and "You are O" in asked[1] and "You are X" not in asked[1]
    assert "Your opponent plays b2" in asked[2] and "Your opponent plays b1" in asked[3]
    assert [sampling.stop_strings for _, sampling in generator.requests] == [("</move>",)] * 5
    assert len(set(generator.seeds)) == 5, "the opponent's seeds are its own"
    assert rollout.sampled_tokens == sum(len(turn.tokens) for turn in rollout.turns if turn.sampled)


class OnePastSelf:
    """A pool with one earlier self."""

    def __init__(self, generator: ScriptedGenerator, quantile: float) -> None:
        self.drawn = PastSelf(generator, quantile)
        self.seeds: list[int] = []

    def draw(self, seed: int) -> PastSelf:
        self.seeds.append(seed)
        return self.drawn


@pytest.mark.parametrize(("quantile", "met"), [(0.29, True), (0.31, False)])
def test_an_earlier_self_plays_the_other_side_in_its_share_of_groups(quantile: float, met: bool) -> None:
    policy = ScriptedGenerator(*says(*(("a1", "b1", "c1") if met else ("a1", "b2", "b1", "c3", "c1"))))
    earlier = ScriptedGenerator(*says("b2", "c3"))
    policy.version, past = 12, OnePastSelf(earlier, quantile)
    group = play_group(TwoPlayer(opponent="past", past_share=0.3), START, policy, past=past)
    (rollout,) = group.rollouts
    assert rollout.error is None and (rollout.reward, rollout.metrics["opponent_age"]) == (1.0, 12.0 if met else 0.0)
    assert len(earlier.requests) == 2 * met and len(past.seeds) == 1
    again = OnePastSelf(ScriptedGenerator(*says("b2", "c3")), 0.0)
    play_group(TwoPlayer(opponent="past"), START, ScriptedGenerator(*says("a1", "b1", "c1")), past=again)
    assert again.seeds == past.seeds, "of the run's seed and the group's place"


def test_without_earlier_selves_an_opponent_from_the_past_says_what_to_set() -> None:
    rollout = play_group(TwoPlayer(opponent="past"), START, ScriptedGenerator(*says("a1"))).rollouts[0]
    assert rollout.error is not None and "set opponent to self" in rollout.error


def test_an_opponent_that_writes_no_legal_move_plays_a_random_one_which_is_counted() -> None:
    group = play_group(TwoPlayer(opponent="self"), START, ScriptedGenerator(*says("a1"), "resign", *says("zz")))
    assert group.rollouts[0].metrics["opponent_illegal_moves"] == 1.0 and group.rollouts[0].error is None


def test_a_served_model_is_an_opponent() -> None:
    replies = says("b2", "c3", "a2")
    with llm_server(lambda request, number: replies[number]) as server:
        endpoint = {"base_url": server.base_url, "model": "m", "cache": "off"}
        rollout = played(TwoPlayer(opponent="endpoint", endpoint=endpoint), START, *says("a1", "b1", "c1"))
    assert rollout.reward == 1.0 and [message["role"] for message in server.requests[1]["messages"]] == [
        "user",
        "assistant",
        "user",
    ]


def test_where_nobody_serves_the_policy_the_error_says_what_to_set() -> None:
    with pytest.raises(NoPolicyError, match=r"cluster\.environment_hosts"):
        get_policy()
    rollout = run_script(TwoPlayer(opponent="self"), START, ScriptedGenerator(*says("a1", "b1")))
    assert rollout.error is not None and "NoPolicyError" in rollout.error


def test_stop_strings_and_states_come_from_environments_in_other_processes() -> None:
    data = DataSource(size=1)
    description = EnvironmentDescription(alias="g", name="two_player", options={"opening_moves": 0}, sources=(data,))
    environment = connect(description, [EnvironmentServerThread(description).transport])
    generator = ScriptedGenerator(*says("a1", "b2"))
    rollout = play_group(environment, environment.tasks(data)[0], generator).rollouts[0]
    assert rollout.error is None and generator.requests[0][1].stop_strings == ("</move>",)
    assert len(rollout.turn_states) == len(rollout.policy_turns) and rollout.turn_states[0] is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"game": "chess"}, "there is no game 'chess'"),
        ({"game": "connect_four", "opponent": "perfect"}, "too large to be searched"),
        ({"opponent": "endpoint"}, "set endpoint"),
        ({"endpoint": {"base_url": "http://h/v1", "model": "m"}}, "set endpoint"),
        ({"opening_moves": -1}, "at least 0"),
        ({"opponent": "past", "snapshot_every": 0}, "snapshot_every is 0"),
        ({"opponent": "past", "pool_size": 0}, "pool_size is 0"),
        ({"opponent": "past", "past_share": 0.0}, "set it above 0"),
        ({"opponent": "self", "pool_size": 9}, "pool_size is an option of past"),
        ({"game": "pathlib:Path"}, "no subclass"),
    ],
)
def test_options_of_two_player_games_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=said):
        TwoPlayer(**options)._draw(Random(0))
