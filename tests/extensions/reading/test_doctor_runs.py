"""``strop doctor`` on runs that live, hang, were killed and came to their end."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from loop.runs import grpo, strop
from loop.stuck import StuckAt, begun, end, until
from loop.test_console_runs import run_unread

pytestmark = pytest.mark.slow


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
    assert run_unread("doctor", str(tmp_path / "logs")) == 141


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
