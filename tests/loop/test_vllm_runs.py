"""Whole runs that sample with the real vLLM: what they report, and what becomes of them when a process is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from loop.killing import Kill
from loop.runs import Outcome, Running, heed_interrupts, metrics_of, overrides, start, tiny_config
from loop.tiny import build_tiny
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.waits import read_status
from support.forks import fork_own_server, with_vllm
from support.needs import needs_vllm
from support.sweep import sweep

needs_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VLLM = {
    "policy.generation.backend": "vllm",
    "policy.generation.vllm_cfg.kv_cache_memory_gb": 0.125,
    "policy.generation.vllm_cfg.num_threads": 1,
    "policy.generation.weight_sync.proof": "always",
    "logger.console": "plain",
}
ASYNCHRONOUS = {
    "policy.generation.colocated.enabled": False,
    "grpo.async_grpo.enabled": True,
    "grpo.async_grpo.max_trajectory_age_steps": 2,
    "grpo.async_grpo.in_flight_weight_updates": True,
}
GENTLE = {"policy.optimizer.kwargs.lr": 0.0001}
EXACT = 1.0005  # token_mult_prob_error in float32


@pytest.fixture(scope="module", autouse=True)
def vllm_is_imported_once() -> Iterator[None]:
    with with_vllm():
        yield


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny", head_dim=32)


def begin(model: Path, folder: Path, *, before: Callable[[], None] | None = None, **changes: Any) -> Running:
    return start(["grpo", *overrides({**tiny_config(model), **VLLM, **changes})], folder, before=before)


def run(model: Path, folder: Path, *, before: Callable[[], None] | None = None, **changes: Any) -> Outcome:
    return begin(model, folder, before=before, **changes).finish(300)


def engines_of(running: Running) -> list[psutil.Process]:
    """The processes that vLLM started for a run."""
    family = psutil.Process(running.process.pid).children(recursive=True)
    return [process for process in family if process.name().startswith("VLLM") or "VLLM::" in " ".join(process.cmdline())]


def wait_for(running: Running, ready: Callable[[], bool], seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert running.process.is_alive(), (running.folder / ".err").read_text() + (running.folder / ".out").read_text()
        assert time.monotonic() < deadline, (running.folder / ".out").read_text()
        time.sleep(0.02)


def steps_logged(running: Running) -> int:
    file = running.folder / "logs" / "metrics.jsonl"
    return max(metrics_of(running.folder / "logs"), default=0) if file.exists() else 0


def assert_each_rollout_once(folder: Path, steps: int) -> None:
    seen = [(record.step, record.group, record.sample) for record in RolloutStore(folder / "logs").read_all()]
    assert len(seen) == len(set(seen))
    assert {step for step, _, _ in seen} == set(range(1, steps + 1))


def gone(processes: list[psutil.Process], seconds: float = 15) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.exhaustive
def test_a_run_samples_with_vllm_and_each_publish_is_proven(served: Path, tmp_path: Path) -> None:
    outcome = run(served, tmp_path, **{"grpo.max_num_steps": 4})
    assert outcome.code == 0, outcome.out + outcome.err
    metrics = metrics_of(tmp_path / "logs")
    for step in range(1, 5):
        assert 1 <= metrics[step]["train/token_mult_prob_error"] < EXACT
        assert metrics[step]["weights/canary_error"] < 1e-4
        assert metrics[step]["weights/tensors_read_back"] > 0 and metrics[step]["weights/tensors_not_read_back"] == 0
    assert_each_rollout_once(tmp_path, 4)


def test_an_asynchronous_run_goes_on_in_flight_and_holds_its_bound_on_age(served: Path, tmp_path: Path) -> None:
    outcome = run(
        served,
        tmp_path,
        before=fork_own_server,  # the other runs begin as a user's does, by another interpreter, which imports vLLM for 15 seconds
        **ASYNCHRONOUS,
        **{"grpo.max_num_steps": 6, "grpo.use_dynamic_sampling": True, "grpo.dynamic_sampling_max_gen_batches": 500},
    )
    assert outcome.code == 0, outcome.out + outcome.err
    metrics = metrics_of(tmp_path / "logs")
    assert max(metrics) == 6
    assert all(metrics[step]["train/staleness_max"] <= 2 for step in range(1, 7))
    assert any(metrics[step]["train/staleness_max"] > 0 for step in range(1, 7)), "rollouts were sampled ahead"
    assert_each_rollout_once(tmp_path, 6)


@pytest.mark.parametrize("mode", sweep(["synchronous", "asynchronous"]))
def test_an_engine_that_is_killed_half_way_is_started_anew_and_nothing_is_lost(served: Path, tmp_path: Path, mode: str) -> None:
    changes = {"grpo.async_grpo.in_flight_weight_updates": False} if mode == "asynchronous" else {}
    ahead = {**ASYNCHRONOUS, **changes} if mode == "asynchronous" else {}
    running = begin(served, tmp_path, **ahead, **{"grpo.max_num_steps": 6, "grpo.val_period": 0, **GENTLE})
    wait_for(running, lambda: steps_logged(running) >= 2)
    victims = engines_of(running)
    assert victims
    victims[-1].kill()
    outcome = running.finish(300)
    assert outcome.code == 0, outcome.out + outcome.err
    metrics = metrics_of(tmp_path / "logs")
    assert sorted(metrics) == list(range(1, 7))
    assert max(line.get("generation/restarts", 0) for line in metrics.values()) == 1
    if mode == "synchronous":
        for line in metrics.values():
            assert 1 <= line["train/token_mult_prob_error"] < EXACT and line["weights/canary_error"] < 1e-4
            assert line["weights/tensors_read_back"] > 0 and line["weights/tensors_not_read_back"] == 0
    assert all(metrics[step]["train/groups_dropped"] == 0 for step in metrics)
    assert_each_rollout_once(tmp_path, 6)


@pytest.mark.exhaustive
def test_a_learner_that_is_killed_in_the_middle_of_a_publish_leaves_no_engine_and_its_run_goes_on(
    served: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"grpo.max_num_steps": 4, "grpo.val_period": 0, "checkpointing.save_period": 1}
    running = begin(served, tmp_path, before=Kill("in the middle of a publish", 3), **settings)
    wait_for(running, lambda: steps_logged(running) >= 1)
    engines = engines_of(running)
    assert engines
    running.process.join(120)
    assert running.process.exitcode == -signal.SIGKILL
    assert gone(engines), "an engine outlived the process that it was sampling for"
    assert max(metrics_of(tmp_path / "logs")) < 4

    resumed = run(served, tmp_path, **settings)
    assert resumed.code == 0, resumed.out + resumed.err
    assert sorted(metrics_of(tmp_path / "logs")) == [1, 2, 3, 4]
    assert_each_rollout_once(tmp_path, 4)


@pytest.mark.exhaustive
@pytest.mark.exhaustive
def test_a_stuck_engine_is_named_in_the_log_and_ctrl_c_ends_it(served: Path, tmp_path: Path) -> None:
    limits = {"watchdog.generation_seconds": 2, "watchdog.interval_seconds": 0.5}
    running = begin(served, tmp_path, before=heed_interrupts, **limits, **{"grpo.max_num_steps": 4000, "grpo.val_period": 0})
    wait_for(running, lambda: steps_logged(running) >= 1)
    engines = engines_of(running)
    for process in engines:
        process.suspend()
    wait_for(running, lambda: "-> engine, turn 1, for" in (tmp_path / ".out").read_text(), 30)
    status = read_status(tmp_path / "logs")
    assert status is not None and status.troubles
    for process in engines:
        process.resume()
    os.kill(running.process.pid, signal.SIGINT)
    outcome = running.finish(60)
    assert outcome.code == 130
    assert "Interrupted. Start the same command again" in outcome.err and "Traceback" not in outcome.err
    assert gone(engines)
