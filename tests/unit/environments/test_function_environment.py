"""Plain functions as rewards: what is called, what it is named, what is refused."""

from __future__ import annotations

import asyncio
import functools
import json
from dataclasses import replace

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError, reward
from strop.environments.compute_rewards import compute_group_rewards, compute_rewards
from strop.environments.function_environment import FunctionEnvironment
from strop.environments.handle import LocalEnvironment
from strop.environments.registry import list_marks, make_environment
from strop.environments.rewards import RewardError
from strop.types import Task

TASK = Task(id="t1", question="1+1?", answer="2", metadata={"level": 3})


def correct(task, rollout):
    return task.answer in rollout.text


def checked(task, rollout) -> bool:
    return rollout.text == task.answer


async def short(task, rollout):
    await asyncio.sleep(0)
    return 1 / (1 + len(rollout.text))


def best(task, rollouts):
    longest = max(len(rollout.text) for rollout in rollouts)
    return [len(rollout.text) == longest for rollout in rollouts]


@reward(weight=0.5, accuracy=True, group=True)
def marked(task, completions_of_the_group):
    return [1.0] * len(completions_of_the_group)


def score(environment, rollout):
    return asyncio.run(compute_rewards(environment, TASK, rollout))


def test_one_function_scores_by_its_own_name_and_is_the_accuracy(wrote):
    environment = FunctionEnvironment(reward=correct)
    rollout = wrote(TASK, "It is 2.")
    scored = score(environment, rollout)
    assert (scored.reward, scored.rewards) == (1.0, {"correct": 1.0})
    assert environment.accuracy(replace(rollout, rewards=scored.rewards)) == 1.0
    assert not LocalEnvironment(environment).traits.has_group_rewards


def test_several_functions_have_names_and_weights(wrote):
    environment = FunctionEnvironment(rewards={"right": correct, "brief": {"function": short, "weight": 0.2}})
    scored = score(environment, wrote(TASK, "2"))
    assert scored.rewards == {"right": 1.0, "brief": 0.5} and scored.reward == pytest.approx(1.1)
    assert list(FunctionEnvironment(rewards=[correct, short]).reward_functions) == ["correct", "short"]
    lighter = FunctionEnvironment(rewards=[correct, short], reward_weights={"short": 0.0})
    assert score(lighter, wrote(TASK, "2")).reward == 1.0


@pytest.mark.parametrize(
    ("rewards", "accuracy"),
    [
        ([correct, short], 5.0),  # the total: nothing says which
        ([checked, short], 1.0),  # annotated to return bool
        ({"checked": checked, "again": checked}, 5.0),  # two are
        ([short, {"function": correct, "accuracy": True}], 2.0),
        ([checked, {"function": correct, "accuracy": True}], 2.0),
        ([short], 3.0),
        ([{"function": short, "accuracy": False}], 5.0),
        ([marked, checked], 4.0),
    ],
)
def test_the_accuracy_is_what_is_marked_else_what_returns_bools_else_the_only_one(rewards, accuracy, wrote):
    rollout = replace(wrote(TASK, "2"), reward=5.0, rewards={"checked": 1.0, "correct": 2.0, "short": 3.0, "marked": 4.0})
    assert FunctionEnvironment(rewards=rewards).accuracy(rollout) == accuracy


def test_a_function_of_rollouts_sees_all_completions_of_the_prompt(wrote):
    environment = FunctionEnvironment(rewards=[correct, best, marked])
    rollouts = [replace(wrote(TASK, text), reward=1.0, rewards={"correct": 1.0}) for text in ("2", "22", "12")]
    assert LocalEnvironment(environment).traits.has_group_rewards
    assert score(environment, rollouts[0]).rewards == {"correct": 1.0}
    scored = asyncio.run(compute_group_rewards(environment, TASK, rollouts))
    assert [dict(result.rewards) for result in scored] == [
        {"correct": 1.0, "best": value, "marked": 1.0} for value in (0.0, 1.0, 1.0)
    ]
    assert [result.reward for result in scored] == [1.5, 2.5, 2.5]


@pytest.mark.parametrize("returned", [1.0, None, [1.0], [1.0, float("nan")], "ab", [1.0, "x"]])
def test_a_group_reward_that_is_no_list_of_numbers_is_an_error_that_says_how_many(returned, wrote):
    environment = FunctionEnvironment(reward={"function": lambda task, rollouts: returned})
    with pytest.raises(RewardError, match=r"<lambda> returned .* on task 't1'; .*one for each of the 2 rollouts"):
        asyncio.run(compute_group_rewards(environment, TASK, [wrote(TASK, "1"), wrote(TASK, "2")]))


def test_arrays_and_tensors_are_lists_of_numbers(wrote):
    import torch

    environment = FunctionEnvironment(reward={"function": lambda task, rollouts: torch.tensor([0.5, 1.0])})
    scored = asyncio.run(compute_group_rewards(environment, TASK, [wrote(TASK, "1"), wrote(TASK, "2")]))
    assert [result.reward for result in scored] == [0.5, 1.0]


def test_a_function_that_raises_is_an_error_of_the_rollout(wrote):
    def broken(task, rollout):
        return task.metadata["gold"]

    with pytest.raises(RewardError, match=r"broken raised KeyError on task 't1': 'gold'"):
        score(FunctionEnvironment(reward=broken), wrote(TASK, "2"))
    with pytest.raises(RewardError, match=r"returned nan on task 't1'; a reward is a finite number or a bool, or None for"):
        score(FunctionEnvironment(reward=lambda task, rollout: float("nan")), wrote(TASK, "2"))


def test_a_reward_of_none_says_that_the_rollout_cannot_be_scored(wrote):
    scored = score(FunctionEnvironment(reward=lambda task, rollout: None), wrote(TASK, "2"))
    assert (scored.unscored, scored.reward) == (True, 0.0)
    compares = FunctionEnvironment(reward=lambda task, rollouts: [None, 1.0])
    results = asyncio.run(compute_group_rewards(compares, TASK, [wrote(TASK, "1"), wrote(TASK, "2")]))
    assert [(each.unscored, each.reward) for each in results] == [(True, 0.0), (False, 1.0)]


def test_functions_are_named_by_file_and_by_module(tmp_path, monkeypatch, wrote):
    (tmp_path / "rewards_of_mine.py").write_text("def correct(task, rollout):\n    return rollout.text == task.answer\n")
    environment = make_environment("reward_function", {"reward": f"{tmp_path}/rewards_of_mine.py:correct"})
    assert score(environment, wrote(TASK, "2")).rewards == {"correct": 1.0}
    monkeypatch.chdir(tmp_path)
    options = {"rewards": {"right": {"function": "rewards_of_mine:correct", "weight": 2}}}
    assert score(make_environment("reward_function", options), wrote(TASK, "2")).reward == 2.0
    assert [*list_marks("reward_function", options)] == ["right"]


def test_the_whole_row_is_in_reach_and_data_needs_no_answers(wrote):
    rows = [{"prompt": "1+1?", "solution": {"value": "2", "steps": ["add"]}}]
    task = FunctionEnvironment(reward=correct).tasks(DataSource(rows=rows, output_key="solution.value"))[0]
    assert (task.question, task.answer, task.metadata) == ("1+1?", "2", rows[0])
    haiku = FunctionEnvironment(reward=short).tasks(DataSource(rows=[{"prompt": "Write a haiku."}]))[0]
    assert haiku.answer == ""


def test_prompts_may_be_conversations(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2"}]
    environment = FunctionEnvironment(reward=correct)
    task = environment.tasks(DataSource(rows=rows, system_prompt="Add."))[0]
    assert [message.role for message in environment.prompt(task)] == ["system", "user"]
    (tmp_path / "prompt.txt").write_text("Question: {question}")
    with pytest.raises(ValueError, match="prompt_file applies only to plain questions"):
        environment.tasks(DataSource(rows=rows, prompt_file=str(tmp_path / "prompt.txt")))


def trl_style(prompts, completions, **kwargs):
    return [0.0]


def four(data_source, solution_str, ground_truth, extra_info):
    return 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "there is no reward; set reward to a function"),
        ({"reward": correct, "rewards": [correct]}, "both set; keep one"),
        ({"rewards": []}, "there is no reward"),
        ({"rewards": [correct, correct]}, "two rewards are named 'correct'"),
        ({"reward": "correct"}, "'correct' is not a function; write file.py:name or module:name"),
        ({"reward": "strop.types:Task"}, "not a function; a reward is called with"),
        ({"reward": "strop.types:users"}, "has no 'users'; did you mean 'user'"),
        ({"reward": "strop.environments.arithmetic:Arithmetic"}, "is an environment; set type to it"),
        ({"reward": 3}, "is 3, not a function"),
        ({"reward": {"function": correct, "wait": 1}}, "no option 'wait'; did you mean 'weight'"),
        ({"reward": {"function": correct, "weight": "1"}}, "weight of the reward correct is '1'; set it to a finite number"),
        ({"reward": {"function": correct, "accuracy": 1}}, "option accuracy of the reward correct is 1; set it to true or false"),
        ({"rewards": {"a": {"weight": 1}}}, "the reward a has no function; set function to"),
        ({"reward": lambda task: 1.0}, "too many positional arguments; a reward is called with"),
        ({"reward": four}, "missing a required argument"),
        ({"reward": trl_style}, r"takes \(prompts, completions, \*\*kwargs\); .*Rename its parameters"),
        ({"reward": lambda rollout, task: 1.0}, "Rename its parameters"),
        ({"rewards": [{"function": each, "accuracy": True} for each in (correct, short)]}, "at most one can be"),
        ({"reward": correct, "reward_weights": {"corect": 1.0}}, "did you mean 'correct'"),
        ({"reward": correct, "rewrd_weights": {}}, "no option 'rewrd_weights'"),
    ],
)
def test_what_is_no_reward_is_an_error_that_says_what_to_set(options, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        make_environment("reward_function", options)


def test_a_function_in_place_of_the_type_is_an_error_that_names_reward(tmp_path):
    (tmp_path / "mine.py").write_text("def correct(task, rollout):\n    return True\n")
    with pytest.raises(EnvironmentConfigError, match=r"set env\.ALIAS\.reward=.*mine.py:correct in place of the type"):
        make_environment(f"{tmp_path}/mine.py:correct")


def test_a_partial_function_counts_by_what_is_left_open(wrote):
    def longer(task, rollout, *, than):
        return len(rollout.text) > than

    environment = FunctionEnvironment(rewards={"long": functools.partial(longer, than=3)})
    assert score(environment, wrote(TASK, "1234")).rewards == {"long": 1.0}
    assert json.dumps(score(environment, wrote(TASK, "1")).rewards) == '{"long": 0.0}'
