"""Gymnasium's environments, played in text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.environments.registry import make_environment
from strop.extensions.adapters.gymnasium_environment import (
    GymnasiumEnvironment,
    InvalidAction,
    describe_space,
    drop_colours,
    parse_action,
)
from support.adapter_episodes import episode, play

gymnasium = pytest.importorskip("gymnasium")
LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}
WAY = ["down", "down", "right", "right", "down", "right"]


def test_frozen_lake_is_won_with_the_rewards_of_gymnasium_in_the_turn_that_earned_them():
    environment = make_environment("gymnasium", {**LAKE, "render": True})
    seen, result = play(environment, [f"I go <action>{move}</action>" for move in WAY])
    assert seen[0].endswith("An action is one of left, down, right, up.\n\n[S]FFF\nFHFH\nFFFH\nHFFG")
    assert "SFFF\n[F]HFH" in seen[1] and seen[-1] is None
    assert result.rewards == {"score": 1.0, "solved": 1.0}
    assert [step.reward for step in result.step_rewards] == [0, 0, 0, 0, 0, 1]
    assert result.metrics == {"over": 1.0, "invalid_actions": 0.0}


def test_a_text_that_is_no_action_is_told_and_the_game_stays_where_it_was():
    environment = make_environment("gymnasium", {**LAKE, "invalid_reward": -0.5})
    seen, result = play(environment, ["fly", "down", "down"])
    assert seen[1] == "'fly' is not an action. An action is one of left, down, right, up."
    assert seen[2:] == ["4", "8"]
    assert result.rewards["score"] == -0.5 and result.metrics == {"over": 0.0, "invalid_actions": 1.0}


def test_the_loop_of_gymnasiums_documentation_and_an_episode_see_the_same():
    """The loop of its front page, as it stands there but for the policy, then the same actions as texts."""
    environment = make_environment("gymnasium", {"id": "CartPole-v1", "solved_at": 20})
    task = environment.tasks(DataSource(seed=5))[7]
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=task.seed)
    actions, total, episode_over = [], 0.0, False
    while not episode_over:
        action = int(observation[2] > 0)
        observation, reward, terminated, truncated, _ = env.step(action)
        actions.append(str(action))
        total += reward
        episode_over = terminated or truncated
    env.close()
    _, result = play(environment, actions, index=7, seed=5)
    assert result.rewards == {"score": total, "solved": float(total >= 20)}


def test_a_task_is_the_same_whenever_it_is_asked_for_and_others_differ():
    environment = make_environment("gymnasium", {"id": "CartPole-v1"})
    first, again, other, held_out = (
        play(environment, [], index=index, seed=3, split=split)[0]
        for index, split in ((0, "train"), (0, "train"), (1, "train"), (0, "validation"))
    )
    assert first == again and other != first and held_out != first


def test_a_game_that_is_cut_off_by_its_time_limit_is_over():
    environment = make_environment("gymnasium", {**LAKE, "kwargs": {"is_slippery": False, "max_episode_steps": 2}})
    seen, result = play(environment, ["left", "left", "left"])
    assert len(seen) == 3 and seen[-1] is None and result.rewards["solved"] == 0.0


def test_functions_of_the_user_describe_and_parse(tmp_path):
    (tmp_path / "own.py").write_text(
        "def describe(observation, environment):\n    return f'field {observation} of {environment.observation_space.n}'\n"
        "def parse(text, environment):\n    if text not in 'LDRU':\n        raise ValueError('Write L, D, R or U.')\n"
        "    return 'LDRU'.index(text)\n"
    )
    options = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "instruction": "Cross the lake."}
    own = {name: f"{tmp_path}/own.py:{name}" for name in ("describe", "parse")}
    seen, _ = play(make_environment("gymnasium", {**options, **own}), ["D", "x"])
    assert seen == ["Cross the lake.\n\nfield 0 of 16", "field 4 of 16", "Write L, D, R or U."]


def test_an_environment_class_of_the_user_is_played(tmp_path):
    (tmp_path / "echo.py").write_text(
        "import gymnasium\nfrom gymnasium.spaces import Text\n"
        "class Echo(gymnasium.Env):\n"
        "    observation_space = action_space = Text(20)\n"
        "    def __init__(self, word='hello', render_mode=None):\n        self.word = word\n"
        "    def reset(self, *, seed=None, options=None):\n        super().reset(seed=seed)\n        return self.word, {}\n"
        "    def step(self, action):\n        return action, float(action == self.word), True, False, {}\n"
    )
    environment = make_environment(
        "gymnasium", {"id": f"{tmp_path}/echo.py:Echo", "kwargs": {"word": "bye"}, "instruction": "Repeat."}
    )
    seen, result = play(environment, ["bye"])
    assert seen == ["Repeat.\n\nbye", None] and result.reward == 1.0


SPACES: dict[str, tuple[Callable[[object], object], str, object]] = {
    "discrete": (lambda s: s.Discrete(3, start=1), "I take 2.", 2),
    "text": (lambda s: s.Text(9), "<action>go</action>", "go"),
    "multi_discrete": (lambda s: s.MultiDiscrete([2, 5]), "[1, 4]", [1, 4]),
    "multi_binary": (lambda s: s.MultiBinary(2), "[1, 0]", [1, 0]),
    "box": (lambda s: s.Box(-1, 1, (2,)), "[0.5, -1]", [0.5, -1.0]),
    "tuple": (lambda s: s.Tuple((s.Discrete(2), s.Discrete(2))), "[0, 1]", (0, 1)),
    "dict": (
        lambda s: s.Dict({"turn": s.Discrete(2), "speed": s.Box(0, 9, ())}),
        '{"turn": 1, "speed": 3}',
        {"turn": 1, "speed": 3.0},
    ),
}


@pytest.mark.parametrize("kind", SPACES)
def test_actions_of_every_space_are_read_and_described(kind):
    make, text, wanted = SPACES[kind]
    space = make(gymnasium.spaces)
    action = parse_action(space, text)
    assert space.contains(action) and describe_space(space)
    if isinstance(wanted, dict):
        assert {name: float(value) for name, value in action.items()} == wanted
    else:
        assert (list(action) if isinstance(wanted, list) else action) == wanted


@pytest.mark.parametrize(
    "text", ["", "7", "-1", "nan", "[1]", "[9, 9]", "{", "[[[[", "1e999", '{"turn": true}', "[" * 5000, "null"]
)
@pytest.mark.parametrize("kind", SPACES)
def test_hostile_texts_are_no_action_or_one_of_the_space(kind, text):
    space = SPACES[kind][0](gymnasium.spaces)
    try:
        assert space.contains(parse_action(space, text))
    except InvalidAction as error:
        assert len(str(error)) < 400


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "FrozenLak-v1"}, "did you mean 'FrozenLake-v1'"),
        ({"id": "FrozenLake-v1", "actions": ["left"]}, "actions names 1 choices"),
        ({"id": "FrozenLake-v1", "kwargs": {"speed": 3}}, "cannot make FrozenLake-v1"),
        ({}, "needs the option id"),
    ],
)
def test_what_gymnasium_does_not_have_is_an_error_at_the_start(options, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        make_environment("gymnasium", options)


def test_colours_of_a_terminal_become_brackets():
    assert drop_colours("\x1b[41mS\x1b[0mF\x1b[1;31mH\x1b[0m") == "[S]FH"


def test_episodes_side_by_side_do_not_see_each_other():
    environment = GymnasiumEnvironment(**{**LAKE, "actions": tuple(LAKE["actions"])})

    async def both() -> list[float]:
        plays = await asyncio.gather(*(episode(environment, moves) for moves in (WAY, ["down", "right"], WAY)))
        return [result.reward for _, result in plays]

    assert asyncio.run(both()) == [1.0, 0.0, 1.0]
