"""Whole runs whose environment is plain functions in a file, named in the configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loop.runs import Outcome, grpo, metrics_of

pytestmark = pytest.mark.slow

FUNCTIONS = """
async def correct(task, rollout) -> bool:
    assert task.metadata["level"] in (0, 1)
    return rollout.text.strip() == task.answer

def digits(task, rollout):
    return sum(letter.isdigit() for letter in rollout.text) / 4

def longest(task, rollouts):
    most = max(rollout.sampled_tokens for rollout in rollouts)
    return [rollout.sampled_tokens == most for rollout in rollouts]

def sometimes(task, rollouts):
    if int(task.answer) % 3 == 0:
        raise KeyError("the table of answers is gone")
    return [float(rollout.sample) for rollout in rollouts]

def always(task, rollout):
    raise KeyError("the table of answers is gone")
"""
SETTINGS: dict[str, Any] = {
    "env.arithmetic.max_operand": ...,
    "env.arithmetic.wording": ...,
    "data.train.env_name": ...,
    "data.train.dataset_name": "rows.jsonl",
    "data.train.split_validation_size": 8,
    "data.validation.env_name": ...,
    "data.validation.size": ...,
}


@pytest.fixture
def trained(tiny: Path, tmp_path: Path) -> Callable[..., Outcome]:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    rows = [{"prompt": f"{n}+{m}=", "answer": n + m, "level": m % 2} for n in range(6) for m in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(**changes: Any) -> Outcome:
        return grpo(tiny, tmp_path, **SETTINGS, **changes)

    return run


def test_a_reward_of_one_function_trains_and_is_the_accuracy(trained, tmp_path):
    outcome = trained(**{"env.mine.reward": "rewards.py:digits", "grpo.max_num_steps": 8, "policy.optimizer.kwargs.lr": 0.02})
    assert outcome.code == 0, outcome.err
    metrics = metrics_of(tmp_path / "logs")
    assert metrics[8]["train/reward"] > metrics[1]["train/reward"] + 0.1
    assert metrics[8]["validation/accuracy"] == metrics[8]["validation/reward"] > 0.5
    assert "rows.jsonl has no column 'problem': 'prompt' is read in its place" in outcome.out + outcome.err
    assert "reward: rewards.py:digits" in (tmp_path / "logs" / "config.yaml").read_text()


def test_rewards_of_several_functions_have_weights_and_see_the_group(trained, tmp_path):
    weighted = {"function": "rewards.py:digits", "weight": 0.5}
    rewards = {"correct": "rewards.py:correct", "digits": weighted, "longest": "rewards.py:longest"}
    outcome = trained(**{"env.mine.rewards": rewards, "grpo.max_num_steps": 2})
    assert outcome.code == 0, outcome.err
    for line in metrics_of(tmp_path / "logs").values():
        parts = {name: line[f"train/rewards/{name}"] for name in rewards}
        assert line["train/reward"] == pytest.approx(parts["correct"] + 0.5 * parts["digits"] + parts["longest"])
        assert 0 < parts["longest"] <= 1 and line["validation/accuracy"] < line["validation/reward"]


def test_a_group_reward_that_sometimes_raises_is_counted_and_the_run_goes_on(trained, tmp_path):
    outcome = trained(**{"env.mine.reward": "rewards.py:sometimes", "grpo.max_num_steps": 3})
    assert outcome.code == 0, outcome.err
    assert sum(line["train/groups_dropped_for_errors"] for line in metrics_of(tmp_path / "logs").values()) > 0


@pytest.mark.parametrize(
    ("reward", "code", "said"),
    [
        ("rewards.py:always", 1, "RewardError: rewards.py:always raised KeyError on task 'rows.jsonl:"),
        ("rewards.py:alway", 2, "env.mine.reward: 'rewards.py' has no 'alway'; did you mean 'always'?"),
        ("correct", 2, "env.mine.reward: the reward 'correct' is not a function; write file.py:name or module:name"),
    ],
)
def test_a_reward_that_cannot_work_stops_the_run_in_its_own_words(trained, reward, code, said):
    outcome = trained(**{"env.mine.reward": reward, "grpo.val_period": 0, "checkpointing.metric_name": None})
    assert outcome.code == code and "error: " in outcome.err and "Traceback" not in outcome.err
    assert said in outcome.err
