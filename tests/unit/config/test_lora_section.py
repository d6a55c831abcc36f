"""The section ``lora_cfg``: NeMo-RL's keys as they stand in its recipes, and what does not go together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strop.config import ConfigError, GrpoRunConfig, load_config
from strop.config.schema.run_config import SftRunConfig
from strop.models.lora_config import LoraConfig

RECIPE: dict[str, Any] = {  # as every recipe of NeMo-RL has it
    "enabled": False,
    "target_modules": [],
    "exclude_modules": [],
    "match_all_linear": True,
    "dim": 8,
    "alpha": 32,
    "dropout": 0.0,
    "dropout_position": "post",
    "lora_A_init": "xavier",
    "use_triton": True,
}


def test_a_recipe_of_nemo_rl_is_the_default_spelled_out() -> None:
    assert replace(LoraConfig(**RECIPE), match_all_linear=None) == LoraConfig()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ["q_proj"], "match_all_linear": True}, "target_modules is q_proj, but match_all_linear=true selects"),
        ({"match_all_linear": False}, "selects no layer"),
        ({"dropout": 1.0}, "less than 1"),
        ({"dim": 0}, "greater than or equal to 1"),
        ({"lora_A_init": "zeros"}, "'xavier' or 'uniform'"),
        ({"rank": 8}, "rank"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraConfig(**changes)


def problems_of(root: type[Any], section: str, *overrides: str) -> str:
    adapters = "policy.dtensor_cfg.lora_cfg"
    given = ["policy.model_name=m", f"{section}.val_period=0", f"{adapters}.enabled=true", f"{adapters}.dropout=0.1", *overrides]
    try:
        load_config(None, given, root=root)
    except ConfigError as error:
        return str(error)
    return ""


def test_dropout_of_adapters_is_for_recorded_data() -> None:
    sampled = problems_of(
        GrpoRunConfig, "grpo", "data.train.env_name=arithmetic", "env.arithmetic={}", "checkpointing.metric_name=null"
    )
    assert "policy.dtensor_cfg.lora_cfg.dropout" in sampled and "sampled without dropout" in sampled
    assert "dropout" not in problems_of(SftRunConfig, "sft", "data.train.dataset_name=rows.jsonl")
