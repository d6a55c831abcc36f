"""Keys of NeMo-RL about the run, its checkpoints and its engines that are carried over."""

from __future__ import annotations

from typing import Any

import pytest

from strop.config import ConfigError, LoadedConfig, load_config
from strop.config.recipes.difference import Effect
from strop.config.schema.run_config import GrpoRunConfig

BASE = ("policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}", "grpo.val_period=0")
MODE = "policy.generation.vllm_cfg.logprobs_mode"


def load(*overrides: str) -> LoadedConfig[GrpoRunConfig]:
    return load_config(None, [*BASE, "checkpointing.metric_name=null", *overrides], root=GrpoRunConfig)


def effects(loaded: LoadedConfig[Any]) -> dict[str, Effect]:
    return {difference.key: difference.effect for difference in loaded.differences}


def test_raw_logprobs_are_accepted_where_they_are_the_same() -> None:
    loaded = load(f"{MODE}=raw_logprobs")
    assert loaded.config.policy.generation.vllm_cfg.logprobs_mode == "processed_logprobs"
    assert effects(loaded) == {MODE: Effect.RENAMED}


@pytest.mark.parametrize("changed", ["temperature=0.7", "top_p=0.9", "top_k=50", "min_p=0.1"])
def test_raw_logprobs_of_another_distribution_are_refused_by_what_changes_it(changed: str) -> None:
    with pytest.raises(ConfigError, match=f"with policy.generation.{changed} tokens are sampled from another distribution"):
        load(f"{MODE}=raw_logprobs", f"policy.generation.{changed}")


def test_environment_variables_of_engines_may_be_numbers_or_null() -> None:
    variables = load("policy.generation.vllm_cfg.env_vars={A: 1, B: x, C: 0.5}").config.policy.generation.vllm_cfg.env_vars
    assert variables == {"A": "1", "B": "x", "C": "0.5"}
    assert load("policy.generation.vllm_cfg.env_vars=null").config.policy.generation.vllm_cfg.env_vars == {}


@pytest.mark.parametrize(("saved", "often", "every"), [(10, 1, 1), (10, 5, 5), (10, 4, 2), (0, 3, 3)])
def test_checkpoints_against_faults_are_saved_as_often(saved: int, often: int, every: int) -> None:
    keys = (f"checkpointing.save_period={saved}", f"checkpointing.ft_save_period={often}", "checkpointing.ft_keep_latest_k=1")
    loaded = load(*keys)
    assert loaded.config.checkpointing.save_period == every
    assert effects(loaded) == {
        "checkpointing.ft_save_period": Effect.CHANGED,
        "checkpointing.ft_keep_latest_k": Effect.UNUSED,
    }


def test_saving_beside_training_and_the_team_of_a_tracker_are_carried_over() -> None:
    config = load("checkpointing.is_async=true", "logger.wandb.entity=team").config
    assert config.checkpointing.async_save and config.logger.wandb.entity == "team"


def test_how_batches_and_weights_travel_is_left_out() -> None:
    loaded = load(
        "data_plane={enabled: true, impl: transfer_queue}",
        "policy.generation.refit_transport=nixl",
        "policy.generation.refit_cfg={nixl: {device: cuda}}",
        "policy.refit_buffer_size_gb=8",
        "grpo.debug_payload_metrics=true",
    )
    assert set(effects(loaded).values()) == {Effect.UNUSED} and len(loaded.differences) == 5


@pytest.mark.parametrize("key", ["cap_max_tokens_to_context=true", "enable_thinking=true", "enforce_monotonicity=false"])
def test_keys_of_the_engine_that_nothing_reads_are_left_out(key: str) -> None:
    assert list(effects(load(f"policy.generation.vllm_cfg.{key}")).values()) == [Effect.UNUSED]


def test_the_fused_adam_of_transformer_engine_is_the_one_of_torch() -> None:
    loaded = load(
        "policy.optimizer.name=transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
        "policy.optimizer.kwargs={lr: 1.0e-6, master_weights: true, store_param_remainders: true, exp_avg_dtype: torch.bfloat16}",
    )
    optimizer = loaded.config.policy.optimizer
    assert optimizer.name == "torch.optim.AdamW" and optimizer.kwargs["lr"] == 1e-6
    assert not {"master_weights", "store_param_remainders", "exp_avg_dtype"} & set(optimizer.kwargs)
    assert effects(loaded) == {"policy.optimizer.name": Effect.CHANGED}


def test_experts_of_the_rollout_are_replayed_and_the_prefix_cache_keeps_them() -> None:
    """NeMo-RL's own recipes turn the prefix cache off, beside which newer vLLMs keep the experts."""
    engine = ("policy.generation.backend=vllm", "policy.generation.vllm_cfg.enable_prefix_caching=false")
    loaded = load("policy.router_replay.enabled=true", *engine)
    assert loaded.config.policy.router_replay.enabled
    assert [problem.key for problem in loaded.warnings if "experts" in problem.message] == [
        "policy.generation.vllm_cfg.enable_prefix_caching"
    ]
