"""Runs that get stuck are named in time, and ``strop doctor`` says how runs stand that live, hang, were killed and came to their end."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loop.runs import Running, grpo, heed_interrupts, overrides, start, strop, tiny_config
from loop.stuck import SamplerOff, StuckAt
from strop.monitoring.waits import Status, read_status

pytestmark = pytest.mark.slow

LIMITS = {
    "watchdog.interval_seconds": 0.1,
    "watchdog.environment_seconds": 0.5,
    "watchdog.generation_seconds": 0.5,
    "watchdog.training_seconds": 0.5,
}
LIMIT = (
    r"step 2 has waited longer than the limit of 0\.5 s \(watchdog\.{kind}_seconds\): training loop -> {chain}, for ([0-9.]+) s"
)
CHAINS = {
    "environment": r"generation -> group \d+ \(task .* of arithmetic\) -> sample \d -> environment Arithmetic, rewards \(task .*\)",
    "engine": r"generation -> group \d+ \(task .* of arithmetic\) -> sample \d -> engine, turn 1",
    "learner": r"policy_training",
}
KINDS = {"environment": "environment", "engine": "generation", "learner": "training"}
NTH = {"environment": 40, "engine": 40, "learner": 2}  # all in the second step: a step has 32 rollouts and one update


def begun(tiny: Path, folder: Path, before: Callable[[], None] = heed_interrupts, **changes: Any) -> Running:
    settings = {**LIMITS, "grpo.val_period": 0, "checkpointing.metric_name": None, "checkpointing.save_period": 1, **changes}
    return start(["grpo", *overrides(tiny_config(tiny, **settings))], folder, before=before)


def until(folder: Path, seen: Callable[[Status], bool], seconds: float = 60) -> Status:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (status := read_status(folder / "logs")) is not None and seen(status):
            return status
        time.sleep(0.02)
    raise AssertionError(f"not seen in time; the last status is {read_status(folder / 'logs')}")


def end(running: Running, signal_number: int = signal.SIGKILL) -> None:
    os.kill(running.process.pid, signal_number)
    running.process.join(30)


STUCK = [(point, how) for point in ("environment", "engine", "learner") for how in ("waits", "blocks")]


@pytest.mark.parametrize(
    ("point", "how"),
    [
        *(pytest.param(*stuck, marks=() if stuck == ("engine", "waits") else pytest.mark.exhaustive) for stuck in STUCK),
        pytest.param("learner", "in a thread", marks=pytest.mark.exhaustive),
    ],
)
def test_what_is_stuck_is_named_within_its_limit_and_the_run_ends_if_asked_to(tiny, tmp_path, point, how):
    running = begun(tiny, tmp_path, StuckAt(point, NTH[point], how), **{"watchdog.stop_after_seconds": 2.5})
    outcome = running.finish(60)
    assert outcome.code == 1
    found = re.search(LIMIT.format(kind=KINDS[point], chain=CHAINS[point]), outcome.err)
    assert found, outcome.err
    assert 0.5 <= float(found[1]) < 2.5, "at its limit, and not only when the run ended"
    assert "the run was ended after waiting longer than watchdog.stop_after_seconds = 2.5" in outcome.err
    assert ("blocked the event loop" in outcome.err) == (how == "blocks")
    (stacks,) = (tmp_path / "logs").glob("stacks_*.txt")
    assert "stuck.py" in stacks.read_text(), "the very line is in the stacks"
    status = read_status(tmp_path / "logs")
    assert status is not None and status.state == "failed" and status.step == 1 and "WatchdogTimeout" in str(status.error)


def test_the_doctor_sees_a_run_live_hang_die_go_on_and_come_to_its_end(tiny, tmp_path):
    missing = strop("doctor", "logs", folder=tmp_path)
    assert missing.code == 2 and "there is no logs" in missing.err

    running = begun(tiny, tmp_path, StuckAt("environment", 40, "waits"), **{"watchdog.environment_seconds": 3.0})
    until(tmp_path, lambda status: any(wait.kind == "environment" for wait in status.waits) and status.step == 1)
    lives = strop("doctor", "logs", folder=tmp_path)
    assert (lives.code, lives.err) == (0, ""), lives.out
    assert "running: nothing is over its limit" in lives.out

    status = until(tmp_path, lambda status: bool(status.troubles))
    hangs = strop("doctor", "logs", folder=tmp_path)
    assert hangs.code == 1
    assert re.search(r"state +hung: step 2 has waited longer than the limit of 3 s", hangs.out)
    assert re.search(r"environment Arithmetic, rewards \(task .*\): [0-9.]+ of 3 s  OVER ITS LIMIT", hangs.out)
    assert "the environment does not answer" in hangs.out and f"kill -INT {status.pid}" in hangs.out

    end(running)
    dead = strop("doctor", "logs", "--json", folder=tmp_path)
    found = json.loads(dead.out)
    assert dead.code == 1 and found["verdict"] == "dead" and "died without a final status" in found["why"]
    assert found["step"] == 1 and found["checkpoint"] == str(tmp_path / "results" / "step_1")
    assert any("start the same command again; it continues from" in line for line in found["advice"])

    assert begun(tiny, tmp_path).finish().code == 0
    done = strop("doctor", "logs", folder=tmp_path)
    assert done.code == 0 and re.search(r"state +finished", done.out) and re.search(r"last step +6", done.out)
    by_config = strop("doctor", "logs/config.yaml", folder=tmp_path)
    by_checkpoint = strop("doctor", "results/step_6", folder=tmp_path)
    assert by_config.out == by_checkpoint.out == done.out


def test_the_doctor_tells_interrupted_and_failed_runs_from_others(tiny, tmp_path):
    running = begun(tiny, tmp_path, **{"grpo.max_num_steps": 100_000, "checkpointing.enabled": False})
    until(tmp_path, lambda status: status.step >= 1)
    end(running, signal.SIGINT)
    interrupted = strop("doctor", "logs", folder=tmp_path)
    assert interrupted.code == 1 and re.search(r"state +interrupted", interrupted.out)

    failed = grpo(tiny, tmp_path / "failed", **{"data.max_input_seq_length": 2, "grpo.max_errors_in_a_row": 3})
    assert failed.code == 1
    told = strop("doctor", "logs", folder=tmp_path / "failed")
    assert told.code == 1 and "TooManyDropped: 3 groups in a row failed" in told.out and "fix the error, then" in told.out


@pytest.mark.exhaustive
def test_a_stopped_process_is_a_hung_run(tiny, tmp_path):
    running = begun(tiny, tmp_path, **{"grpo.max_num_steps": 100_000, "checkpointing.enabled": False})
    until(tmp_path, lambda status: status.step >= 1)
    os.kill(running.process.pid, signal.SIGSTOP)
    try:
        time.sleep(2.8)  # four intervals of a tenth of a second, and two seconds
        hung = strop("doctor", "logs", folder=tmp_path)
        assert hung.code == 1 and "even its watchdog has been silent" in hung.out
    finally:
        end(running)


def test_without_a_watchdog_there_is_no_status_and_the_doctor_says_so(tiny, tmp_path):
    assert grpo(tiny, tmp_path, **{"watchdog.enabled": False, "grpo.max_num_steps": 1}).code == 0
    assert not (tmp_path / "logs" / "status.json").exists()
    told = strop("doctor", "logs", folder=tmp_path)
    assert told.code == 1 and "watchdog.enabled=false" in told.out


def test_a_mismatch_between_sampler_and_learner_is_warned_of_ends_the_run_and_leaves_its_table(tiny, tmp_path):
    changes = {"policy.generation.mismatch": {"warn": 1.1, "stop": 1.1, "stop_after": 2}, "logger.console": "plain"}
    outcome = grpo(tiny, tmp_path, before=SamplerOff(0.5), **changes)
    assert outcome.code == 1 and "mismatch.stop = 1.1 for 2 steps in a row" in outcome.err
    assert "warning: mismatch: step 1: sampler and learner differ by a factor of 1.649" in outcome.out
    rows = [json.loads(line) for line in (tmp_path / "logs" / "rollouts" / "step_000001_ratios.jsonl").read_text().splitlines()]
    assert len(rows) == 32 and all(row["log_ratio"] == pytest.approx(0.5, abs=1e-4) for row in rows)
    assert all(row["text"] and row["context"].endswith("assistant\n") == (row["position"] == 1) for row in rows)
    told = strop("doctor", "logs", folder=tmp_path)
    assert "MismatchTooLarge" in told.out and "train/token_mult_prob_error 1.6487" in told.out
