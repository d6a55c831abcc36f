"""Whole runs: what they say while they run, what they say at the end, and to whom nobody listens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loop.kinds import train, train_to_end
from loop.runs import grpo, metrics_of
from strop.monitoring.trackers.aliases import TRL, VERL

pytestmark = pytest.mark.slow

ANSWERING = """
from dataclasses import dataclass
from strop.environments.arithmetic import Arithmetic
from strop.types import user

@dataclass(frozen=True, kw_only=True)
class Answering(Arithmetic):
    async def respond(self, task, rollout):
        return (user("go on"),)
"""


def test_an_environment_that_answers_says_that_it_may_not_from_the_start_to_the_end(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "answering.py").write_text(ANSWERING)
    changes = {
        "env.arithmetic.type": "answering.py:Answering",
        "logger.console": "plain",
        "grpo.max_num_steps": 2,
        "loss_fn.reference_policy_kl_penalty": 0.01,
    }
    outcome = grpo(tiny, tmp_path, **changes)
    assert outcome.code == 0, outcome.err
    warned = [line for line in outcome.out.splitlines() if "set grpo.max_rollout_turns=N" in line]
    first_step = next(line for line in outcome.out.splitlines() if "step 1/2" in line)
    assert len(warned) == 2 and outcome.out.index(warned[0]) < outcome.out.index(first_step)
    logged = metrics_of(tmp_path / "logs")
    assert [logged[step]["health/single_turn"] for step in (1, 2)] == [1, 1]
    assert [logged[step]["train/epoch"] for step in (1, 2)] == [4 / 10_000, 8 / 10_000]
    assert logged[2]["train/total_tokens"] == logged[1]["train/tokens_trained"] + logged[2]["train/tokens_trained"]
    lines = [line[16:] for line in outcome.out.splitlines()]
    for said in (
        "... loading the model: ",
        "10000 tasks to train on, 8 to validate on",
        "... making the reference",
        "... starting the torch",
    ):
        assert any(line.startswith(said) for line in lines), said
    for name in ("ppo", "dpo"):
        train_to_end(name, tiny, tmp_path / name, **{f"{name}.max_num_steps": 1})
    folders = (tmp_path, tmp_path / "ppo", tmp_path / "dpo")
    names = {name for folder in folders for line in metrics_of(folder / "logs").values() for name in line}
    pattern = {name: re.escape(name).replace(r"\{name\}", "[^/]+") for name in {*TRL, *VERL}}
    assert not [name for name in pattern if not any(re.fullmatch(pattern[name], logged) for logged in names)], (
        "aliases of nothing"
    )


def test_a_learning_rate_that_spoils_the_weights_stops_the_run(tiny: Path, tmp_path: Path) -> None:
    changes = {
        "policy.optimizer.name": "torch.optim.SGD",  # Adam's rate is refused above 1
        "policy.optimizer.kwargs.lr": 1000,
        "policy.optimizer.kwargs.weight_decay": 1000,
        "sft.max_num_steps": 30,
        "sft.max_skipped_steps_in_a_row": 4,
    }
    outcome = train("sft", tiny, tmp_path, **changes)
    assert outcome.code == 1 and "Traceback" not in outcome.err
    assert (
        "every optimizer step of the last 4 steps was skipped" in outcome.err and "sft.max_skipped_steps_in_a_row" in outcome.err
    )
    logged = metrics_of(tmp_path / "logs")
    assert list(logged) == [1, 2, 3, 4, 5] and logged[4]["health/skipped_steps"] == 1


@pytest.mark.exhaustive
def test_held_out_rows_that_are_never_used_are_mentioned(tiny: Path, tmp_path: Path) -> None:
    outcome = train("sft", tiny, tmp_path, **{"sft.val_period": 100, "sft.max_num_steps": 2, "logger.console": "plain"})
    assert outcome.code == 0, outcome.err
    said = outcome.out
    assert said.count("#never_validated") == 2 and "sft.val_at_end=true" in said
    assert said.rstrip().endswith("strop serve results/step_2")
    assert "... reading data: 0 of" in said and "strop rollouts" not in said and "generating" not in said
    assert run_unread("doctor", str(tmp_path / "logs")) == 141


def run_unread(*command: str) -> int:
    """Run a command whose output nobody reads. Return its exit code."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "strop", *command], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writing)
    assert ended.stderr == ""
    return ended.returncode


def test_a_command_whose_output_nobody_reads_ends_without_a_traceback() -> None:
    assert run_unread("config") == 141 and run_unread("--help") == 0
