"""A whole run with a tool: what it stores by turn, what the environment measures, and text that no file can hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.runs import grpo, metrics_of
from strop import Run, cli

pytestmark = pytest.mark.slow

ENVIRONMENT = """
from dataclasses import dataclass

from strop.environments.base import Environment, GeneratedTasks, reward
from strop.types import Message, Task, user


@dataclass(frozen=True, kw_only=True)
class Tool(Environment[Task]):
    def tasks(self, data):
        odd = "" if data.held_out else "\\udc80"
        return GeneratedTasks(8, lambda index: Task(id=f"task-{index}{odd}", question=f"{index}+1=", answer=str(index + 1)))

    async def respond(self, task, rollout):
        rollout.metrics["calls"] = len(rollout.policy_turns)
        return (Message("tool", "\\0 nothing found"), user("Again."))

    @reward(accuracy=True)
    def length(self, task, rollout):
        return len(rollout.text) / 10
"""


def test_a_run_stores_turns_and_metrics_and_outlives_text_that_no_file_can_hold(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tool.py").write_text(ENVIRONMENT)
    outcome = grpo(
        tiny, tmp_path, env__tool__type="tool.py:Tool", env__arithmetic__max_operand=..., env__arithmetic__wording=...,
        data__train__env_name="tool", data__validation__env_name="tool", data__max_input_seq_length=100,
        policy__max_total_sequence_length=250, policy__generation__max_new_tokens=6, grpo__max_rollout_turns=2,
        grpo__max_num_steps=2, grpo__num_generations_per_prompt=16, grpo__val_period=2, logger__console="plain",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert (outcome.out + outcome.err).count("step 1: the environment tool gave text with lone surrogates") == 1

    run = Run(tmp_path / "logs")
    rollouts = run.rollouts
    assert len(rollouts) == 2 * 4 * 16 and rollouts.task_id.str.endswith("\N{REPLACEMENT CHARACTER}").all()
    spoken = rollouts[rollouts.turns.map(len) > 1]
    assert len(spoken), "no rollout went on after its first turn"
    for row in spoken.itertuples():
        assert [turn["role"] for turn in row.turns] == ["assistant", "tool", "user", "assistant"]
        assert row.turns[1]["text"] == "\0 nothing found" and row.metrics["calls"] >= 1
        assert row.turns[-1]["end"] == len(row.tokens) and row.prompt_messages[0]["role"] == "user"
    assert metrics_of(tmp_path / "logs")[2]["train/environments/tool/calls"] >= 1

    for arguments in (["--best", "2"], ["--validation"]):
        assert cli.main(["rollouts", str(tmp_path / "logs"), *arguments]) == 0
    out = capsys.readouterr().out
    assert "rewards: length" in out and "metrics: accuracy" in out
