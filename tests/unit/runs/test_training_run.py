"""What a run of training says around its steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strop.config import GrpoRunConfig, load_config
from strop.runs.train import make_closing
from strop.trainer.listeners import Listeners


@pytest.mark.parametrize(("mode", "said"), [("offline", True), ("online", False)])
def test_a_run_whose_tracker_sends_nothing_says_how_to_send_it_later(
    mode: str, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.chdir(tmp_path)
    keys = ["policy.model_name=m", "env.arithmetic={}", "logger.wandb_enabled=true", "logger.log_dir=logs/x"]
    config = load_config(None, keys, root=GrpoRunConfig, check=False).config
    run: Any = SimpleNamespace(last_metrics={}, listeners=Listeners())
    assert ("wandb sync logs/x/wandb/offline-run-*" in str(make_closing(config, run, [], 1.0))) == said
