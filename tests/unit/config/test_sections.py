"""Sections of the configuration one by one: generation, adapters, preemption."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strop.base_config import fields_of
from strop.config import ConfigError, GrpoRunConfig, LoadedConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.generation.generation_config import GenerationConfig
from strop.models.lora_config import LoraConfig
from strop.sampling import MAX_RECORDED_TOP_K, Sampling


def test_keeping_the_sampling_mask_records_in_training_and_not_in_validation() -> None:
    config = GenerationConfig(keep_sampling_mask=True, top_k=512, top_p=0.9)
    assert Sampling(**config.sampling_options()).records_sampling_mask
    assert not Sampling(**config.sampling_options(validation=True)).record_sampling_mask
    assert not Sampling(**GenerationConfig(top_k=512, top_p=0.9).sampling_options()).record_sampling_mask


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": -1}])
def test_sets_without_a_bound_on_their_size_are_refused_with_what_to_set(filters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"keep_sampling_mask[\s\S]*needs a top_k[\s\S]*set top_k, for instance to 512"):
        GenerationConfig(keep_sampling_mask=True, **filters)
    GenerationConfig(keep_sampling_mask=False, **filters)


def test_without_filters_there_is_nothing_to_keep_and_nothing_to_refuse() -> None:
    assert not Sampling(**GenerationConfig(keep_sampling_mask=True).sampling_options()).records_sampling_mask


def test_the_description_names_the_bound_that_is_enforced() -> None:
    assert f"at most {MAX_RECORDED_TOP_K}" in str(fields_of(GenerationConfig)["keep_sampling_mask"].description)


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
    SftRunConfig = pytest.importorskip("strop.extensions.recorded.recorded_config").SftRunConfig
    sampled = problems_of(
        GrpoRunConfig, "grpo", "data.train.env_name=arithmetic", "env.arithmetic={}", "checkpointing.metric_name=null"
    )
    assert "policy.dtensor_cfg.lora_cfg.dropout" in sampled and "sampled without dropout" in sampled
    assert "dropout" not in problems_of(SftRunConfig, "sft", "data.train.dataset_name=rows.jsonl")


QUICK = "examples/configs/quickstart.yaml"
TWO = "data.train=[{env_name: arithmetic, prompts_per_step: 3}, {env_name: arithmetic, prompts_per_step: 1}]"


def load(*overrides: str, kind: str = "grpo") -> LoadedConfig[Any]:
    return load_config(QUICK if kind == "grpo" else None, overrides, root=TRAINING_RUNS[kind])


def refused(*overrides: str, kind: str = "grpo") -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, kind=kind)
    return " ".join("\n".join(str(problem) for problem in caught.value.problems).split())


def warned(*overrides: str) -> str:
    return "\n".join(str(problem) for problem in load(*overrides).warnings)


def test_quotas_that_add_up_to_a_step_are_the_shares() -> None:
    found = load(TWO, "grpo.num_prompts_per_step=4").config
    assert [entry.share for entry in found.data.train] == [3, 1]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [TWO, "grpo.num_prompts_per_step=8"],
            "data.train.0.prompts_per_step: the entries of data.train have 3 + 1 = 4 groups per step, but grpo.num_prompts_per_step is 8 "
            "Set grpo.num_prompts_per_step=4, or prompts_per_step of the entries so that they add up to 8.",
        ),
        (["data.train=[{env_name: arithmetic, prompts_per_step: 3}, {env_name: arithmetic}]"],
         "data.train: some entries have prompts_per_step and some do not ([3, None])"),
        (["data.train.prompts_per_step=4", "data.train.weight=2", "grpo.num_prompts_per_step=4"],
         "data.train.weight: found 2.0, but prompts_per_step=4"),
    ],
)  # fmt: skip
def test_what_cannot_work_says_what_to_set(overrides: list[str], said: str) -> None:
    assert said in refused(*overrides)


@pytest.mark.extensions
def test_recorded_data_has_quotas() -> None:
    model = ("policy.model_name=m", "sft.val_period=0", "checkpointing.enabled=false")
    two = "data.train=[{dataset_name: squad, prompts_per_step: 24}, {dataset_name: squad, prompts_per_step: 8}]"
    found = load(*model, two, "policy.train_global_batch_size=32", kind="sft").config
    assert [entry.share for entry in found.data.train] == [24, 8]
    assert "policy.train_global_batch_size is null Set policy.train_global_batch_size=32." in refused(
        *model, two, "policy.train_global_batch_size=null", kind="sft"
    )


def test_keys_that_change_nothing_are_warned_about() -> None:
    assert "data.validation.prompts_per_step: it has no effect" in warned("data.validation.prompts_per_step=4")


BASE = ("policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}", "grpo.val_period=0")
BY = "checkpointing.checkpoint_must_save_by"


def loaded(*overrides: str) -> GrpoRunConfig:
    return load_config(None, [*BASE, "checkpointing.metric_name=null", *overrides], root=GrpoRunConfig).config


@pytest.mark.parametrize(
    ("text", "seconds"), [("null", None), ("'00:03:45:00'", 13500.0), ("'1:0:0:1'", 86401.0), ("'00:00:00:00'", 0.0)]
)
def test_run_time_is_days_hours_minutes_and_seconds(text: str, seconds: float | None) -> None:
    assert loaded(f"{BY}={text}").checkpointing.save_deadline_seconds == seconds


@pytest.mark.parametrize("text", ["'3:45:00'", "'4 hours'", "14400"])
def test_any_other_form_is_refused_with_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=BY):
        loaded(f"{BY}={text}")


@pytest.mark.parametrize(("off", "key"), [("enabled=false", "enabled"), ("save_period=0", "save_period")])
def test_a_time_to_save_by_where_nothing_is_saved_is_a_warning_as_recipes_of_nemo_rl_run_so(off: str, key: str) -> None:
    warnings = load_config(None, [*BASE, f"{BY}='00:01:00:00'", f"checkpointing.{off}"], root=GrpoRunConfig).warnings
    assert any(f"no checkpoints are saved: checkpointing.{key} is" in str(warning) for warning in warnings)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="save_on_sigterm_within"):
        loaded("checkpointing.save_on_sigterm_within=-1")
