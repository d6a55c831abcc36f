"""Which kind of run a configuration is, when only its file or a few keys are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.config import ConfigError
from strop.config.load.load import PLACEHOLDER_MODEL, load_any_kind
from strop.config.schema.run_config import GrpoRunConfig, SftRunConfig

EXAMPLES = Path(__file__).parents[3] / "examples/configs"


@pytest.mark.parametrize(
    ("file", "section"), [("sft.yaml", "sft"), ("rm.yaml", "rm"), ("grpo_math_1B.yaml", "grpo"), ("dpo.yaml", "dpo")]
)
def test_a_file_is_of_the_kind_whose_section_it_has(file: str, section: str) -> None:
    assert load_any_kind(EXAMPLES / file).config.section == section


def test_without_a_file_the_machines_are_enough() -> None:
    loaded = load_any_kind(None, ["cluster.num_nodes=2", "cluster.gpus_per_node=8"])
    assert isinstance(loaded.config, GrpoRunConfig) and loaded.config.policy.model_name == PLACEHOLDER_MODEL
    assert isinstance(load_any_kind(None, ["sft.seed=1"]).config, SftRunConfig)


def test_machines_that_do_not_go_together_are_refused_without_a_file_too() -> None:
    with pytest.raises(ConfigError, match="segment_size"):
        load_any_kind(None, ["cluster.num_nodes=2", "cluster.segment_size=3"])
