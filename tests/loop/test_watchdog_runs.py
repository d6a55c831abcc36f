"""Runs that get stuck are named in time."""

from __future__ import annotations

import json
import re

import pytest

from loop.runs import grpo
from loop.stuck import SamplerOff, StuckAt, begun
from strop.monitoring.waits import read_status

pytestmark = pytest.mark.slow

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


def test_a_mismatch_between_sampler_and_learner_is_warned_of_ends_the_run_and_leaves_its_table(tiny, tmp_path):
    changes = {"policy.generation.mismatch": {"warn": 1.1, "stop": 1.1, "stop_after": 2}, "logger.console": "plain"}
    outcome = grpo(tiny, tmp_path, before=SamplerOff(0.5), **changes)
    assert outcome.code == 1 and "mismatch.stop = 1.1 for 2 steps in a row" in outcome.err
    assert "warning: mismatch: step 1: sampler and learner differ by a factor of 1.649" in outcome.out
    rows = [json.loads(line) for line in (tmp_path / "logs" / "rollouts" / "step_000001_ratios.jsonl").read_text().splitlines()]
    assert len(rows) == 32 and all(row["log_ratio"] == pytest.approx(0.5, abs=1e-4) for row in rows)
    assert all(row["text"] and row["context"].endswith("assistant\n") == (row["position"] == 1) for row in rows)
    status = read_status(tmp_path / "logs")
    assert status is not None and "MismatchTooLarge" in str(status.error)
