"""Ctrl-C: the run ends at once, says how to go on, and goes on."""

from __future__ import annotations

import os
import signal
import time

import pytest

from loop.runs import grpo, heed_interrupts, metrics_of, overrides, repeatable, start, tiny_config

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_an_interrupted_run_says_how_to_continue_and_continues(tiny, tmp_path):
    changes = {"grpo.max_num_steps": 12, "checkpointing.save_period": 2, "logger.console": "plain"}
    arguments = ["grpo", *overrides(tiny_config(tiny, **changes))]
    running = start(arguments, tmp_path / "parts", before=heed_interrupts)
    deadline = time.monotonic() + 60
    while not (tmp_path / "parts" / "results" / "step_2").exists():
        assert time.monotonic() < deadline and running.process.is_alive()
        time.sleep(0.01)
    os.kill(running.process.pid, signal.SIGINT)
    interrupted = running.finish(timeout=20)
    assert interrupted.code == 130
    assert "Interrupted. Start the same command again to continue from the newest checkpoint in results:" in interrupted.err
    assert "strop grpo" in interrupted.err and "Traceback" not in interrupted.err
    assert list(metrics_of(tmp_path / "parts" / "logs"))[-1] < 12

    resumed = grpo(tiny, tmp_path / "parts", **changes)
    assert resumed.code == 0 and "continuing after step" in resumed.out and "done after step 12" in resumed.out
    assert grpo(tiny, tmp_path / "whole", **changes).code == 0
    assert repeatable(metrics_of(tmp_path / "parts" / "logs")) == repeatable(metrics_of(tmp_path / "whole" / "logs"))
