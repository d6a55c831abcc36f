"""Whole runs of agents: the examples of docs/agents.md as they stand there, and a tree that is learned from."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from loop.runs import grpo, metrics_of
from strop import Run

pytestmark = pytest.mark.slow

DOC = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
EXAMPLES = {block.splitlines()[0].split()[-1]: block for block in re.findall(r"```(?:python|js)\n(.*?)```", DOC, re.DOTALL)}
LEARNER = """
import asyncio
from openai import OpenAI


def run(task, endpoint):
    client = OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    messages = [{"role": "user", "content": task.question}]
    first = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
    client.chat.completions.create(model="m", messages=messages)  # a retry
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Again."}]
    last = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
    return (first + last).count("7") / 8
"""


def run_agent(tiny: Path, folder: Path, options: dict[str, Any], **changes: Any) -> Any:
    rows = [{"problem": f"{first}+{second}=", "answer": str(first + second)} for first in range(4) for second in range(4)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, content in {**EXAMPLES, "learner.py": LEARNER}.items():
        (folder / name).write_text(content)
    return grpo(
        tiny, folder, **{f"env__mine__{name}": value for name, value in options.items()}, env__arithmetic__max_operand=...,
        env__arithmetic__wording=..., data__train__env_name="mine", data__train__dataset_name="sums.jsonl",
        data__train__input_key="problem", data__validation__env_name="mine", data__validation__size=...,
        data__validation__dataset_name="sums.jsonl", data__validation__input_key="problem",
        policy__max_total_sequence_length=300, data__max_input_seq_length=200,
        **{"grpo__max_rollout_turns": 4, "grpo__max_num_steps": 2, "grpo__val_period": 2, **changes},
    )  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [{"agent": "agent.py:run"}, {"command": ["node", "agent.js"]}],
    ids=["python", "node"],
)
def test_the_examples_of_the_page_train(tiny: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    if "command" in options and not shutil.which("node"):
        pytest.skip("node is not installed")
    outcome = run_agent(tiny, tmp_path, options)
    assert outcome.code == 0, outcome.err
    metrics = metrics_of(tmp_path / "logs")
    turns = 2 if "agent" in options else 1
    assert metrics[2]["train/environments/mine/gateway/requests"] == turns and "validation/accuracy" in metrics[2]
    assert len(Run(tmp_path / "logs").rollouts) == 2 * 4 * 8


@pytest.mark.exhaustive
@pytest.mark.parametrize("staleness", [0, 1])
def test_an_agent_learns_from_all_paths_of_its_tree(tiny: Path, tmp_path: Path, staleness: int) -> None:
    outcome = run_agent(
        tiny, tmp_path, {"agent": "learner.py:run"}, grpo__max_num_steps=10, policy__optimizer__kwargs__lr=0.01,
        **({"grpo__async_grpo__enabled": True} if staleness else {}),
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    metrics = metrics_of(tmp_path / "logs")
    rewards = [metrics[step]["train/reward"] for step in range(1, 11)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
    assert metrics[3]["train/environments/mine/gateway/branches"] == 1
    assert staleness or metrics[3]["train/token_mult_prob_error"] < 1.05  # old rollouts are of another policy
