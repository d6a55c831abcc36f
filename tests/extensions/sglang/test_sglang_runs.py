"""Whole runs that sample with the real SGLang: what they report, and that they learn as with vLLM."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
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
        named = re.compile(r"has waited longer than the limit of 4 s .*engine")
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


def check_steps(folder: Path, *, steps: int) -> dict[int, dict[str, float]]:
    """Every step is proven, and sampler and learner agree."""
    metrics = {step: line for step, line in metrics_of(folder / "logs").items() if "train/token_mult_prob_error" in line}
    assert sorted(metrics) == list(range(1, steps + 1))
    for line in metrics.values():
        assert line["weights/tensors_not_read_back"] == 0 and line["weights/canary_error"] < 1e-4
        assert 1 <= line["train/token_mult_prob_error"] < EXACT
    return metrics


def test_a_run_with_lora_sends_sglang_its_adapters_alone(served: Path, tmp_path: Path) -> None:
    lora = {"policy.dtensor_cfg.lora_cfg.enabled": True, "policy.dtensor_cfg.lora_cfg.dim": 8, "policy.optimizer.kwargs.lr": 1e-3}
    sent: dict[bool, float] = {}
    for alone in (True, False):
        folder = tmp_path / str(alone)
        folder.mkdir()
        changes = {"policy.generation.backend": "sglang", **SHARED, **ENGINES["sglang"], **lora, "grpo.max_num_steps": 3}
        changes["policy.generation.weight_sync.adapters_alone"] = alone
        outcome = start(["grpo", *overrides({**tiny_config(served), **changes})], folder).finish(400)
        assert outcome.code == 0, outcome.out + outcome.err
        sent[alone] = check_steps(folder, steps=3)[3]["weights/bytes"]
    assert sent[True] < sent[False] / 2


def test_a_run_about_drawn_images_samples_with_sglang_and_is_evaluated_with_it(tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples"
    model: Path = runpy.run_path(str(examples / "tiny_vlm.py"))["save"](tmp_path / "tiny_vlm", width=32)
    short = {
        "grpo.num_prompts_per_step": 2,
        "grpo.num_generations_per_prompt": 2,
        "grpo.max_val_samples": 2,
        "grpo.val_at_start": False,
        "data.train.size": 8,
        "data.validation.size": 2,
        "checkpointing.checkpoint_dir": "results",
        "logger.log_dir": "logs",
        "policy.model_name": str(model),
        "policy.num_threads": 1,
        "policy.device": "cpu",
        "policy.generation.backend": "sglang",
    }
    changes = {**SHARED, **ENGINES["sglang"], **short, "grpo.max_num_steps": 2}
    command = ["grpo", "--config", str(examples / "configs" / "drawn_images" / "grpo.yaml"), *overrides(changes)]
    outcome = start(command, tmp_path).finish(600)
    assert outcome.code == 0, outcome.out + outcome.err
    check_steps(tmp_path, steps=2)
    evaluated = start(["eval", "logs", "--json"], tmp_path).finish(600)
    assert evaluated.code == 0, evaluated.out + evaluated.err
    assert json.loads(evaluated.out)["tasks"] == 2
    assert list((tmp_path / "logs" / "evaluations").glob("*/workers/engine_0.log"))
