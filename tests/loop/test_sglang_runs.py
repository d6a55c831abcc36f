"""Whole runs that sample with the real SGLang: what they report, and that they learn as with vLLM."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

import psutil
import pytest

from loop.runs import Outcome, metrics_of, overrides, start, tiny_config
from loop.tiny import build_tiny
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from support.needs import needs_vllm
from support.sglang_engines import needs_sglang

needs_sglang()
needs_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]

STEPS = 8
EXACT = 1.0005  # token_mult_prob_error in float32
SHARED = {
    "policy.generation.weight_sync.proof": "always",
    "logger.console": "plain",
    "grpo.max_num_steps": STEPS,
    "grpo.val_period": 0,
}
ENGINES: dict[str, dict[str, Any]] = {
    "sglang": {"policy.generation.sglang_cfg.max_total_tokens": 8192, "policy.generation.sglang_cfg.num_threads": 1},
    "vllm": {"policy.generation.vllm_cfg.kv_cache_memory_gb": 0.125, "policy.generation.vllm_cfg.num_threads": 1},
}
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": {
        "policy.generation.colocated.enabled": False,
        "grpo.async_grpo.enabled": True,
        "grpo.async_grpo.max_trajectory_age_steps": 2,
        "grpo.async_grpo.in_flight_weight_updates": True,
    },
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny", head_dim=32)


def run(model: Path, folder: Path, backend: str, mode: str) -> Outcome:
    changes = {"policy.generation.backend": backend, **SHARED, **ENGINES[backend], **MODES[mode]}
    return start(["grpo", *overrides({**tiny_config(model), **changes})], folder).finish(400)


def rewards_of(folder: Path) -> list[float]:
    return [record.reward for record in RolloutStore(folder / "logs").read_all()]


@pytest.mark.parametrize("mode", list(MODES))
def test_a_run_on_sglang_is_proven_and_earns_what_it_earns_on_vllm(served: Path, tmp_path: Path, mode: str) -> None:
    """The bound: the mean rewards of the two runs differ by less than four standard errors of their difference."""
    rewards: dict[str, list[float]] = {}
    for backend in ENGINES:
        folder = tmp_path / backend
        outcome = run(served, folder, backend, mode)
        assert outcome.code == 0, outcome.out + outcome.err
        metrics = metrics_of(folder / "logs")
        assert sorted(metrics) == list(range(1, STEPS + 1))
        for line in metrics.values():
            assert line["weights/tensors_not_read_back"] == 0 and line["weights/canary_error"] < 1e-4
            if mode == "synchronous":
                assert 1 <= line["train/token_mult_prob_error"] < EXACT
            assert line["train/staleness_max"] <= (2 if mode == "asynchronous" else 0)
        rewards[backend] = rewards_of(folder)
    error = math.sqrt(sum(pvariance(each) / len(each) for each in rewards.values()))
    assert abs(fmean(rewards["sglang"]) - fmean(rewards["vllm"])) < 4 * error + 1e-9


def test_a_scheduler_that_stops_answering_is_named_and_one_that_comes_back_goes_on(served: Path, tmp_path: Path) -> None:
    limits = {"watchdog.interval_seconds": 0.2, "watchdog.generation_seconds": 4, "watchdog.weight_sync_seconds": 4}
    changes = {"policy.generation.backend": "sglang", **SHARED, **ENGINES["sglang"], **limits}
    running = start(["grpo", *overrides({**tiny_config(served), **changes})], tmp_path)
    try:
        _wait_until(lambda: (tmp_path / "logs" / "metrics.jsonl").exists(), 300)
        (scheduler,) = (
            process
            for process in psutil.Process(running.process.pid).children(recursive=True)
            if process.name().startswith("sglang::schedul")
        )
        began = len((tmp_path / ".err").read_text())
        os.kill(scheduler.pid, signal.SIGSTOP)
        named = re.compile(r"waits longer than the limit of 4 s .*engine")
        _wait_until(lambda: named.search((tmp_path / ".err").read_text()[began:]) is not None, 60)
        os.kill(scheduler.pid, signal.SIGCONT)
    finally:
        outcome = running.finish(200)
    assert outcome.code == 0, outcome.err
    assert sorted(metrics_of(tmp_path / "logs")) == list(range(1, STEPS + 1))
    assert not scheduler.is_running()


def _wait_until(seen: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < deadline, "not seen in time"
        time.sleep(0.05)
