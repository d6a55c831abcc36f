"""NeMo-RL's keys of SGLang: most are the same here, the others say what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest

from strop.config import ConfigError, LoadedConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.extensions.recipes.difference import Effect

SECTION = "policy.generation.sglang_cfg"


def load(*overrides: str) -> LoadedConfig[Any]:
    given = ["policy.model_name=m", "policy.generation.backend=sglang", *(f"{SECTION}.{each}" for each in overrides)]
    return load_config(None, given, root=TRAINING_RUNS["grpo"], check=False)


def test_the_gpus_of_all_engines_and_of_each_say_how_many_engines_there_are() -> None:
    loaded = load("tp_size=4", "sglang_server_config.num_gpus=16", "sglang_server_config.num_gpus_per_engine=4")
    assert loaded.config.policy.generation.sglang_cfg.num_engines == 4


def test_arguments_of_the_server_are_passed_on_and_null_ones_are_its_choice() -> None:
    loaded = load("schedule_policy=lpm", "cuda_graph_max_bs=null")
    assert loaded.config.policy.generation.sglang_kwargs == {"schedule_policy": "lpm"}


def test_what_changes_nothing_of_the_training_is_left_out_and_said() -> None:
    unused = ("random_seed=42", "allow_auto_truncate=true", "sglang_server_config.sglang_server_concurrency=9", "model_path=m")
    loaded = load(*unused, "sglang_router_config.use_external_router=false")
    named = {difference.key for difference in loaded.differences if difference.effect is Effect.UNUSED}
    assert {f"{SECTION}.{each.partition('=')[0]}" for each in unused} <= named


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("sglang_router_config.use_external_router=true", "Strop's own pool"),
        ("model_path=other", "engines serve the policy"),
        ("torchao_config=int8wo", "not quantised ones"),
        ("sglang_server_config.num_gpus_per_engine=2", "a GPU for each rank"),
    ],
)
def test_what_strop_would_not_do_is_refused(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(override)
