"""Whole runs whose vLLM engine drafts with the head that is trained beside torch in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.drafting_runs import train_a_head

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]


def test_the_head_is_trained_sent_proven_and_used(tmp_path: Path) -> None:
    train_a_head(tmp_path, {})
