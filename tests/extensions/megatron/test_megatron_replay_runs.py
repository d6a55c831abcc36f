"""A whole GRPO run in which Megatron Core trains with the experts of the rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from extensions.megatron.test_megatron_runs import megatron
from loop.test_router_replay_runs import build_mixture, replay_on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]


def test_ranks_of_megatron_core_replay_what_an_engine_in_another_process_says(tmp_path: Path) -> None:
    replay_on_ranks(build_mixture(tmp_path / "mixture"), tmp_path, megatron(pipeline_model_parallel_size=2))
