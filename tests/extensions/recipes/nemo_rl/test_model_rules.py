"""Keys of trained models in recipes of NeMo-RL: batching, environment variables, Automodel's options, adapters."""

from __future__ import annotations

from typing import Any

import pytest

from strop.config import ConfigError, LoadedConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.extensions.recipes.difference import Effect

BASE = ["policy.model_name=m", "data.train.env_name=math", "env.math={}"]


def load(*overrides: str, section: str = "grpo") -> LoadedConfig[Any]:
    return load_config(None, [*BASE, *overrides], root=TRAINING_RUNS[section])


def effect_of(loaded: LoadedConfig[Any], key: str) -> Effect:
    (effect,) = {difference.effect for difference in loaded.differences if difference.key == key}
    return effect


def refusal(*overrides: str, section: str = "grpo") -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, section=section)
    (problem,) = caught.value.problems
    return str(problem)


def test_dynamic_batching_cuts_by_its_tokens_and_packs() -> None:
    dynamic = [
        "policy.dynamic_batching={enabled: true, train_mb_tokens: 1024, logprob_mb_tokens: 2048, sequence_length_round: 64}"
    ]
    loaded = load("policy.sequence_packing={enabled: false, train_mb_tokens: 600}", *dynamic)
    packing = loaded.config.policy.sequence_packing
    assert (packing.enabled, packing.train_mb_tokens, packing.logprob_mb_tokens) == (True, 1024, 2048)
    assert effect_of(loaded, "policy.dynamic_batching.enabled") is Effect.RENAMED
    critic = load("value.dynamic_batching={enabled: true, train_mb_tokens: 1024}", section="ppo").config.value
    assert critic.sequence_packing.enabled and critic.batching.train_mb_tokens == 1024


def test_environment_variables_go_to_the_learner_s_processes_as_text() -> None:
    loaded = load(
        "cluster.backend=ray",
        "cluster.roles.learner.env_vars={A: mine}",
        "policy.dtensor_cfg.env_vars={A: theirs, B: 1, PYTORCH_CUDA_ALLOC_CONF: ''}",
    )
    assert loaded.config.cluster.roles.learner.env_vars == {"A": "mine", "B": "1", "PYTORCH_CUDA_ALLOC_CONF": ""}
    assert effect_of(loaded, "policy.dtensor_cfg.env_vars") is Effect.RENAMED
    assert effect_of(load("policy.dtensor_cfg.env_vars=null"), "policy.dtensor_cfg.env_vars") is Effect.UNUSED


@pytest.mark.parametrize(
    "key",
    [
        "policy.sequence_packing.fuse_loss=true",
        "policy.offload_optimizer_for_logprob=true",
        "policy.tokenizer.use_fastokens=true",
        "policy.refit_buffer_size_gb=4",
        "policy.dtensor_cfg.clear_cache_every_n_steps=1",
        "policy.dtensor_cfg.automodel_kwargs={force_hf: true}",
        "policy.dtensor_cfg.automodel_kwargs={use_liger_kernel: false, attn_implementation: eager, use_sdpa_patching: false}",
        "policy.dtensor_cfg.automodel_kwargs.backend={attn: te, dispatcher: deepep, fake_balanced_gate: false, gate_precision: float64}",
        "policy.dtensor_cfg.moe_parallelizer={ignore_router_for_ac: true}",
        "policy.dtensor_cfg.lora_cfg.lora_dtype=null",
        "policy.reward_model_cfg={enabled: false, reward_model_type: regression}",
    ],
)
def test_a_key_about_speed_or_memory_changes_nothing(key: str) -> None:
    loaded = load(key)
    assert loaded.config == load().config
    assert {difference.effect for difference in loaded.differences} == {Effect.UNUSED}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("policy.dtensor_cfg.automodel_kwargs.backend.fake_balanced_gate=true", "replaces the router"),
        ("policy.dtensor_cfg.automodel_kwargs.new_option=3", "is not known"),
        ("policy.dtensor_cfg.automodel_kwargs.freeze_config.freeze_language_model=true", "can be frozen"),
        ("policy.pretrained_checkpoint={path: /x}", "Set policy.model_name"),
        ("policy.reward_model_cfg={enabled: true}", "strop rm"),
    ],
)
def test_a_key_that_asks_for_something_else_is_refused_with_what_to_set(key: str, said: str) -> None:
    assert said in refusal(key)
