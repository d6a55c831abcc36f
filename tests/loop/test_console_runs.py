"""Whole runs: what they say while they run, what they say at the end, and to whom nobody listens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loop.runs import grpo, metrics_of

pytestmark = pytest.mark.slow


def test_a_run_says_what_it_does_and_logs_how_far_it_is(tiny: Path, tmp_path: Path) -> None:
    changes = {"logger.console": "plain", "grpo.max_num_steps": 2, "loss_fn.reference_policy_kl_penalty": 0.01}
    outcome = grpo(tiny, tmp_path, **changes)
    assert outcome.code == 0, outcome.err
    logged = metrics_of(tmp_path / "logs")
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


@pytest.mark.exhaustive
@pytest.mark.extensions
def test_a_command_whose_output_nobody_reads_ends_without_a_traceback() -> None:
    assert run_unread("config") == 141 and run_unread("--help") == 0
