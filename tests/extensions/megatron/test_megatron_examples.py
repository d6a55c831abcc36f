"""The configurations of ``examples/configs`` that train with Megatron Core load, also with what their pages add."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.config import load_config
from strop.config.schema.run_config import TRAINING_RUNS
from unit.config.test_example_configs import CONFIGS, section_of
from unit.config.test_example_configs import in_the_repository as in_the_repository
from unit.config.test_example_configs import test_a_documented_command_is_understood as understand


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*_megatron.yaml")), ids=lambda path: path.stem)
def test_an_example_of_megatron_core_loads(path: Path) -> None:
    config = load_config(path, root=TRAINING_RUNS[section_of(path)]).config
    assert config.checkpointing.checkpoint_dir.startswith("results/")


@pytest.mark.parametrize("sizes", ["", " cluster.num_nodes=4 cluster.gpus_per_node=8"])
def test_a_documented_command_for_megatron_core_is_understood(sizes: str) -> None:
    understand(f"examples/run_grpo.py --config examples/configs/grpo_math_1B_megatron.yaml{sizes}", set())
