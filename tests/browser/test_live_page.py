"""The page on a real run while it trains: steps, curves and rollouts come without a reload."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.chromium import serve_view, show

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

SETTINGS = {
    "policy.max_total_sequence_length": 64, "policy.train_micro_batch_size": 4, "policy.precision": "float32", "policy.device": "cpu",
    "policy.num_threads": 1, "policy.generation.max_new_tokens": 4, "policy.generation.torch_cfg.kv_cache_memory_gb": 0.01,
    "data.max_input_seq_length": 60, "data.train.env_name": "arithmetic", "data.validation.env_name": "arithmetic",
    "data.validation.size": 8, "env.arithmetic.max_operand": 3, "env.arithmetic.wording": "'{expression}='", "grpo.num_prompts_per_step": 4,
    "grpo.num_generations_per_prompt": 4, "grpo.max_num_steps": 100000, "grpo.max_num_epochs": "null", "grpo.val_period": 5,
    "checkpointing.enabled": "false", "logger.console": "none",
}  # fmt: skip


VIEWS = {
    "overview": "progress", "time": "policy_training", "configuration": "max_operand", "tasks": "mean reward", "validation": "after step",
    "starred": "Nothing is starred yet", "replays": "No replay is stored",
}  # fmt: skip


@pytest.mark.slow
def test_a_live_run_is_followed(chromium: Any, open_page: Callable[..., Any], tiny_model_folder: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs" / "alive"
    logs.parent.mkdir()
    options = {**SETTINGS, "policy.model_name": tiny_model_folder, "logger.log_dir": logs}
    command = [sys.executable, "-m", "strop", "grpo", *(f"{name}={value}" for name, value in options.items())]
    log = (tmp_path / "run.txt").open("w")
    run = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        with serve_view(tmp_path / "logs") as url:
            page = open_page_when_started(open_page, url, run, tmp_path)
            show(page, "curves", "train/reward")
            page.wait_for_selector(".badge.live")
            page.wait_for_selector('[data-metric="train/reward"] .u-over')
            reading = page.inner_text('[data-metric="train/reward"] .readout')
            page.wait_for_function(
                "old => document.querySelector('[data-metric=\"train/reward\"] .readout').innerText !== old",
                arg=reading,
                timeout=60_000,
            )
            show(page, "now", "Who waits for whom")
            assert "running" in page.inner_text("main")
            show(page, "rollouts", "rollouts")
            page.wait_for_selector(".row")
            count = page.inner_text(".rows .foot")
            page.wait_for_function("old => document.querySelector('.rows .foot').innerText !== old", arg=count, timeout=60_000)
            for view, text in VIEWS.items():
                show(page, view, text)
            run.terminate()
            run.wait(60)
            show(page, "now", "did last")
            page.context.close()  # before the server, which it asks every two seconds
    finally:
        run.kill()
        run.wait()
        log.close()


def open_page_when_started(open_page: Callable[..., Any], url: str, run: Any, folder: Path) -> Any:
    """Open the page before the run has a folder: it says so, and finds the run when there is one."""
    page = open_page(url, wait=False)
    page.wait_for_selector(".card", timeout=240_000)
    assert run.poll() is None, (folder / "run.txt").read_text()
    return page
