"""Verifiers and functions as the rewards of one environment: weights, gates, schedules, and what they do not hold up."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.environments.compute_rewards import compute_group_rewards, compute_rewards
from strop.environments.function_environment import FunctionEnvironment
from strop.environments.registry import list_marks, make_environment
from strop.environments.remote import EnvironmentDescription, EnvironmentServer, Transport, connect
from strop.environments.rewards import WeightSchedule
from strop.types import Task

TASK = Task(id="t", question="1+1?", answer="2")
TAGS = {"verifier": "tags"}
GOOD, BAD = "<think>1+1</think><answer>2</answer>", "2"
called: list[str] = []


def costly(task, rollout):
    called.append(rollout.text)
    return 0.5


def costly_comparison(task, rollouts):
    called.append(f"{len(rollouts)} rollouts")
    return [float(len(rollout.text)) for rollout in rollouts]


inside: list[int] = []
released = threading.Event()


def blocking(task, rollout):
    inside.append(1)
    return released.wait(30)


async def slow(task, rollout):
    inside.append(1)
    for _ in range(6000):
        if released.is_set():
            return 1.0
        await asyncio.sleep(0.005)
    return 0.0


@pytest.fixture(autouse=True)
def forget():
    called.clear()


def score(rewards, rollout, **options):
    return asyncio.run(compute_rewards(FunctionEnvironment(rewards=rewards, **options), TASK, rollout))


def test_verifiers_and_functions_stand_side_by_side_and_each_is_logged_raw_and_weighted(talk):
    rewards = {
        "right": {"verifier": "math", "tag": "answer"},
        "format": {**TAGS, "weight": 0.5},
        "short": {"verifier": "length", "limit": 3, "weight": 0.2},
        "own": costly,
    }
    scored = score(rewards, talk(TASK, GOOD))
    assert scored.rewards == {"right": 1.0, "format": 1.0, "short": 1.0, "own": 0.5}
    assert scored.reward == pytest.approx(1 + 0.5 + 0.2 + 0.5)
    weighted = {name: value for name, value in scored.metrics.items() if name.startswith("weighted/")}
    assert weighted == {"weighted/right": 1.0, "weighted/format": 0.5, "weighted/short": pytest.approx(0.2)}
    assert tuple(list_marks("reward_function", {"rewards": rewards})) == ("right", "format", "short", "own")
    heavier = score(rewards, talk(TASK, GOOD), reward_weights={"short": 2.0})
    assert heavier.reward == pytest.approx(1 + 0.5 + 2 + 0.5) and heavier.metrics["weighted/short"] == 2.0


def test_a_gated_reward_is_not_asked_where_its_gate_is_closed(talk):
    for otherwise, wanted in ((0.0, {"format": 0.0, "own": 0.0}), (-0.5, {"format": 0.0, "own": -0.5}), (None, {"format": 0.0})):
        rewards = {"own": {"function": costly, "gate": {"reward": "format", "otherwise": otherwise}}, "format": TAGS}
        scored = score(rewards, talk(TASK, BAD))
        assert scored.rewards == wanted and scored.reward == sum(wanted.values()) and not called
    assert score({"own": {"function": costly, "gate": "format"}, "format": TAGS}, talk(TASK, GOOD)).reward == 1.5
    assert called == [GOOD]


def test_a_gate_may_multiply_have_a_threshold_and_stand_with_others(talk):
    half = {**TAGS, "credit": "each", "only": False}
    multiplied = {"format": half, "own": {"function": costly, "gate": {"reward": "format", "at_least": 0.3, "multiply": True}}}
    assert score(multiplied, talk(TASK, "<think>a</think>2")).rewards == {"format": 0.5, "own": 0.25}
    both = {
        "own": {"function": costly, "gate": ["format", "right"]},
        "format": half,
        "right": {"verifier": "math", "tag": "answer"},
    }
    assert score(both, talk(TASK, GOOD)).rewards["own"] == 0.5
    assert score(both, talk(TASK, GOOD.replace("2<", "3<"))).rewards["own"] == 0.0
    chained = {
        "last": {"function": costly, "gate": {"reward": "own", "at_least": 0.5, "otherwise": None}},
        "own": {"function": costly, "gate": {"reward": "format", "otherwise": None}},
        "format": TAGS,
    }
    assert score(chained, talk(TASK, BAD)).rewards == {"format": 0.0}  # a reward that is missing opens nothing
    assert list(score(chained, talk(TASK, GOOD)).rewards) == ["format", "own", "last"]


def test_a_comparison_sees_only_the_rollouts_whose_gate_is_open(talk):
    rewards = {"longest": {"function": costly_comparison, "gate": "format", "weight": 2.0}, "format": TAGS}
    environment = FunctionEnvironment(rewards=rewards)
    rollouts = [talk(TASK, text) for text in (GOOD, BAD, GOOD + " ", BAD)]

    async def run():
        scored = [replace(each, **vars(await compute_rewards(environment, TASK, each))) for each in rollouts]
        return await compute_group_rewards(environment, TASK, scored)

    results = asyncio.run(run())
    assert called == ["2 rollouts"]
    assert [result.rewards["longest"] for result in results] == [len(GOOD), 0.0, len(GOOD) + 1, 0.0]
    assert results[0].reward == 1 + 2 * len(GOOD) and results[1].reward == 0.0
    assert results[0].metrics["weighted/longest"] == 2 * len(GOOD)
    called.clear()
    none_open = [replace(talk(TASK, BAD), rewards={"format": 0.0})]
    assert asyncio.run(compute_group_rewards(environment, TASK, none_open))[0].rewards["longest"] == 0.0 and not called


def test_a_verifier_of_each_turn_gives_steps_and_a_closed_gate_gives_none(talk):
    steps = {"verifier": "regex", "pattern": "good", "per_turn": True, "weight": 0.5, "gate": {"reward": "own", "at_least": 0.5}}
    rollout = talk(TASK, "good", "bad", "good")
    scored = score({"step": steps, "own": costly}, rollout)
    assert [(step.token, step.reward) for step in scored.step_rewards] == [(2, 0.5), (5, 0.0), (8, 0.5)] and scored.reward == 1.5
    closed = score({"step": {**steps, "gate": "own"}, "own": costly}, rollout)
    assert closed.step_rewards == () and closed.rewards == {"own": 0.5, "step": 0.0}
    assert [
        name for name, mark in list_marks("reward_function", {"rewards": {"step": steps, "own": costly}}).items() if mark.per_turn
    ] == ["step"]


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("linear", {0: 1.0, 10: 1.0, 15: 0.6, 20: 0.2, 99: 0.2}),
        ("cosine", {0: 1.0, 10: 1.0, 15: 0.6, 12: 1.0 - 0.8 * (1 - 0.5**0.5 * 1.1441228056353687) / 2, 20: 0.2}),
        ("steps", {9: 1.0, 10: 1.0, 19: 1.0, 20: 0.2, 21: 0.2}),
    ],
)
def test_a_schedule_gives_the_weight_of_a_step(kind, weights):
    schedule = WeightSchedule(kind, ((10, 1.0), (20, 0.2)))
    assert {step: schedule.at(step) for step in weights} == pytest.approx(weights)


def test_the_weight_is_of_the_version_that_began_the_group(talk):
    rewards = {"own": {"function": costly, "weight": {"schedule": "linear", "points": {"0": 1.0, 10: 0.0}}}}
    for version, weight in ((0, 1.0), (5, 0.5), (30, 0.0)):
        scored = score(rewards, talk(TASK, "x", version=version))
        assert scored.rewards == {"own": 0.5} and scored.reward == pytest.approx(0.5 * weight)
        assert scored.metrics == {"weighted/own": pytest.approx(0.5 * weight)}
    steps = {"own": {"verifier": "regex", "pattern": "x", "per_turn": True, **{"weight": rewards["own"]["weight"]}}}
    assert score(steps, talk(TASK, "x", version=5)).step_rewards[0].reward == 0.5


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        ({"a": {**TAGS, "gate": "fromat"}, "format": TAGS}, "names 'fromat', which is not a reward; did you mean 'format'"),
        ({"a": {**TAGS, "gate": "b"}, "b": {**TAGS, "gate": "a"}}, "form a cycle: a -> b -> a"),
        ({"a": {**TAGS, "gate": {"reward": "b", "atleast": 1}}, "b": TAGS}, "did you mean 'at_least'"),
        ({"a": {**TAGS, "gate": 3}}, "set it to the name of another reward"),
        ({"a": {**TAGS, "gate": "b"}, "b": costly_comparison}, "which compares all rollouts of a task and is computed after"),
        ({"a": {**TAGS, "per_turn": True, "gate": {"reward": "b", "otherwise": 1}}, "b": TAGS}, "set otherwise to 0 or null"),
        ({"a": {**TAGS, "wieght": 2}}, "the reward a: the verifier tags has no option 'wieght'"),
        ({"a": {"verifier": "mth"}}, "there is no verifier 'mth'; did you mean 'math'"),
        ({"a": {**TAGS, "function": costly}}, "a function and a verifier"),
        ({"a": {**TAGS, "group": True}}, "leave group out"),
        ({"a": {**TAGS, "weight": {"schedule": "linaer", "points": {0: 1}}}}, "did you mean 'linear'"),
        ({"a": {**TAGS, "weight": {"schedule": "linear", "points": {10: 1, 0: 2}}}}, "ascending order"),
        ({"a": {**TAGS, "weight": {"schedule": "linear", "points": {-1: 1}}}}, "has the point -1"),
        ({"a": {**TAGS, "weight": {"schedule": "linear", "point": {0: 1}}}}, "did you mean 'points'"),
        ({"a": {**TAGS, "weight": "1"}}, "finite number"),
        ({"a": {"function": costly, "thread": "yes"}}, "set it to true or false"),
    ],
)
def test_rewards_that_cannot_work_are_refused(rewards, says):
    with pytest.raises(EnvironmentConfigError, match=says):
        make_environment("reward_function", {"rewards": rewards})


def test_the_accuracy_is_the_verifier_that_says_right_or_wrong_and_votes_count_its_answers(talk):
    environment = make_environment(
        "reward_function", {"rewards": {"format": TAGS, "right": {"verifier": "math", "method": "exact"}}}
    )
    assert environment.declares_accuracy and environment.accuracy(replace(talk(TASK, "2"), rewards={"right": 1.0})) == 1.0
    assert environment.answer_key(TASK, talk(TASK, "so \\boxed{4/2}")) == "2"
    assert (
        make_environment("reward_function", {"rewards": {"format": TAGS, "own": costly}}).answer_key(TASK, talk(TASK, "2"))
        is None
    )


def test_what_a_verifier_needs_is_missed_when_the_run_starts(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "1+1?"}))
    data = DataSource(dataset_name=str(tmp_path / "rows.jsonl"))
    make_environment("reward_function", {"rewards": {"format": TAGS}}).tasks(data)
    with pytest.raises(Exception, match="answer"):
        make_environment("reward_function", {"rewards": {"right": {"verifier": "math"}}}).tasks(data)


def test_slow_rewards_of_several_rollouts_run_at_once_while_the_event_loop_goes_on(talk):
    """The rewards end only when all four are inside and the event loop, which is free, says so: else they time out."""

    async def run(rewards):
        environment = FunctionEnvironment(rewards=rewards)
        inside.clear()
        released.clear()
        scoring = asyncio.gather(*(compute_rewards(environment, TASK, talk(TASK, "x")) for _ in range(4)))
        while len(inside) < 4 and not scoring.done():
            await asyncio.sleep(0.005)
        released.set()
        return [each.reward for each in await scoring]

    for rewards in ({"slow": slow}, {"blocking": {"function": blocking, "thread": True}}):
        assert asyncio.run(run(rewards)) == [1.0] * 4, rewards


def test_verifiers_work_in_processes_of_their_own(talk, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "1+1?", "answer": "2"}))
    source = DataSource(dataset_name=str(tmp_path / "rows.jsonl"))
    rewards = {
        "right": {"verifier": "math", "method": "exact", "weight": {"schedule": "steps", "points": {0: 1.0, 5: 3.0}}},
        "format": {**TAGS, "gate": {"reward": "right", "otherwise": None}},
    }
    description = EnvironmentDescription(alias="mine", name="reward_function", options={"rewards": rewards}, sources=(source,))
    server = EnvironmentServer(description)
    loop = asyncio.new_event_loop()
    transport = Transport(server.answer, lambda method, arguments: loop.run_until_complete(server.answer(method, arguments)))
    remote = connect(description, [transport])
    task = remote.tasks(source)[0]
    scored = asyncio.run(remote.score(task, talk(task, "it is 2", version=7)))
    assert scored.rewards == {"right": 1.0, "format": 0.0} and scored.reward == 3.0 and scored.metrics["weighted/right"] == 3.0
    assert asyncio.run(remote.score(task, talk(task, "3", version=7))).rewards == {"right": 0.0}
    assert asyncio.run(remote.grade(task, talk(task, "it is 2"))).answer == "2"
    loop.close()
