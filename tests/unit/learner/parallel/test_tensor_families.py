"""Tensor parallelism by the plans that Transformers' models bring, family by family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks
from tests.unit.learner.parallel.test_tensor_parallel import BOUND, compared

from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from support import models
from support.models import CONFIGS, WINDOW
from support.sweep import sweep

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma3": {},
    "mistral": {},
    "mixtral": {},
    "cohere": {},
    "cohere2": HYBRID,
    "deepseek_v2": ROUTED | LATENT | {"num_key_value_heads": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0},
    "exaone4": HYBRID,
    "glm4": {"head_dim": 8},
    "glm4_moe": ROUTED | {"head_dim": 8, "n_group": 1, "topk_group": 1},
    "gpt_neox": {},
    "granite": {},
    "minimax_m2": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "olmo3": HYBRID,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 1},
    "seed_oss": {"head_dim": 8},
    "smollm3": {"layer_types": ["full_attention"] * 2},
    "starcoder2": {},
}


def config_of(family: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **models._SIZES | FAMILIES[family])


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64)


def every_family(rank: int, sequence: bool, families: list[str]) -> dict[str, tuple[float, float, str]]:
    torch.Tensor.float = double  # type: ignore[method-assign, assignment]  # norms round to float32, in this process no more
    meshes = DeviceMeshes(ParallelDims(tensor=2, sequence=sequence), "cpu")
    found = {}
    for family in families:
        CONFIGS.setdefault(family, lambda family=family: config_of(family))
        found[family] = compared({"family": family}, meshes)
    return found


# In `make test`: one of each kind of attention, of norms and of experts.
KEPT = ("cohere2", "deepseek_v2", "ernie4_5_moe", "gemma3", "glm4", "gpt_neox", "minimax_m2", "olmo2", "qwen2_moe", "starcoder2")


@pytest.mark.slow
@pytest.mark.parametrize("sequence", sweep([False, True], True))
@pytest.mark.parametrize("kept", sweep([False, True], True))
def test_every_familys_plan_gives_the_hidden_states_and_gradients_of_one_process(sequence: bool, kept: bool) -> None:
    for found in run_on_ranks(2, every_family, sequence, [family for family in FAMILIES if family in KEPT or not kept]):
        assert {name: worst for name, worst in found.items() if max(worst[:2]) > BOUND} == {}
