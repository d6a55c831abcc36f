"""The ledger and the replays of a run that was really trained, on the page."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from extensions.replay.test_replayed_runs import make_first_ledger, run_kind
from loop.tiny import build_tiny
from support.chromium import serve_view, show

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_page_shows_the_terms_of_a_loss_and_a_replayed_step(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    kept = {
        "checkpointing__save_period": 1,
        "checkpointing__keep_top_k": None,
    }  # a step is replayed from the checkpoint before it
    logs = run_kind("grpo", build_tiny(tmp_path / "model"), tmp_path / "run", grpo__max_num_steps=2, **kept)
    again = [sys.executable, "-m", "strop", "replay", "logs", "--step", "2", "policy.optimizer.kwargs.lr=0.006"]
    subprocess.run(again, check=True, cwd=logs.parent, capture_output=True)
    ledger = make_first_ledger(logs, 2)
    with serve_view(logs) as address:
        page = open_page(address)
        show(page, f"rollout/2/{ledger.group}/{ledger.sample}?run=logs&tab=ledger", "logged as train/loss")
        assert {term for term in ledger.totals if page.get_by_text(term, exact=True).count() == 0} == set()
        assert page.get_by_text("share of gradient").count() == 1
        show(page, "replays?run=logs", "are equal to the last digit")
        assert page.get_by_text("policy.optimizer.kwargs.lr=0.006").count() == 1
        assert page.get_by_text("angle between the gradients").count() == 1
