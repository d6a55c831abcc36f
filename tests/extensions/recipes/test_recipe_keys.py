"""Keys of NeMo-RL about the run, its checkpoints and its engines that are carried over."""

from __future__ import annotations

from typing import Any

import pytest

from strop.config import ConfigError, LoadedConfig, load_config
from strop.config.schema.run_config import GrpoRunConfig
from strop.extensions.recipes.difference import Effect

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


@pytest.mark.parametrize(("saved", "often", "every"), [(10, 1, 1), (10, 5, 5), (10, 4, 2), (0, 3, 3)])
def test_checkpoints_against_faults_are_saved_as_often(saved: int, often: int, every: int) -> None:
    keys = (f"checkpointing.save_period={saved}", f"checkpointing.ft_save_period={often}", "checkpointing.ft_keep_latest_k=1")
    loaded = load(*keys)
    assert loaded.config.checkpointing.save_period == every
    assert effects(loaded) == {
        "checkpointing.ft_save_period": Effect.CHANGED,
        "checkpointing.ft_keep_latest_k": Effect.UNUSED,
    }


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
