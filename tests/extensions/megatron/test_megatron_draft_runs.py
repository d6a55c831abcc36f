"""A whole run whose vLLM engine drafts with the head that is trained beside Megatron Core on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loop.drafting_runs import train_a_head
from support.needs import needs_megatron

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]

RANKS: dict[str, Any] = {
    "cluster.gpus_per_node": 3,
    "policy.megatron_cfg.enabled": True,
    "policy.dtensor_cfg.enabled": False,
    "policy.optimizer.kwargs.lr": ...,
    "policy.generation.colocated.enabled": False,
    "policy.generation.colocated.resources.gpus_per_node": 1,
}


def test_the_head_beside_megatron_core_is_trained_sent_proven_and_used(tmp_path: Path) -> None:
    needs_megatron()
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    train_a_head(tmp_path, RANKS)
