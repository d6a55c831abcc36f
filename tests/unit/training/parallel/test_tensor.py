"""Tensor parallelism: every rank's hidden states and gradients are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.divided import difference, exact_model, hidden_states, loss_of, tokens_of, whole_gradient
from tests.support.lora import adapted
from tests.support.ranks import on_ranks

from strop.training.torch.parallel.experts import apply_expert_parallel
from strop.training.torch.parallel.layout import Meshes, ParallelSizes
from strop.training.torch.parallel.tensor import apply_tensor_parallel

dist: Any = torch.distributed
BOUND = 1e-12  # float64, relative to each parameter's largest entry
LENGTH = 20

LATENT = {  # DeepSeek-V3's attention, which its own plan leaves whole
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "layers.*.mlp.shared_experts.gate_proj": "colwise",
    "layers.*.mlp.shared_experts.up_proj": "colwise",
    "layers.*.mlp.shared_experts.down_proj": "rowwise",
}
BIASES = {"attention_bias": True, "mlp_bias": True}
EVERYWHERE = {"dim": 4, "alpha": 8}
ATTENTION = EVERYWHERE | {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama, tied, biases": {"family": "llama", "tied": True, "change": BIASES},
    "qwen2": {"family": "qwen2", "tied": True},
    "qwen3": {"family": "qwen3"},
    "gemma2": {"family": "gemma2", "tied": True},
    "phi3": {"family": "phi3"},
    "qwen3_moe": {"family": "qwen3_moe"},
    "deepseek_v3": {"family": "deepseek_v3", "only": False},
    "deepseek_v3, latent": {"family": "deepseek_v3", "plan": LATENT, "change": {"attention_bias": True}},
    "llama, adapters": {"family": "llama", "change": BIASES, "lora": EVERYWHERE},
    "phi3, adapters": {"family": "phi3", "lora": EVERYWHERE},
    "deepseek_v3, adapters": {"family": "deepseek_v3", "lora": ATTENTION, "only": False},
    "deepseek_v3, latent, adapters": {"family": "deepseek_v3", "plan": LATENT, "lora": ATTENTION},
    "llama, checkpointing": {"family": "llama", "checkpointing": True},
    "qwen3_moe, checkpointing, adapters": {"family": "qwen3_moe", "checkpointing": True, "lora": EVERYWHERE},
    "llama, two micro-batches": {"family": "llama", "micro_batches": 2},
    "qwen3_moe, two micro-batches": {"family": "qwen3_moe", "micro_batches": 2},
}


def model_of(case: dict[str, Any]) -> Any:
    model = exact_model(case["family"], tied=case.get("tied", False), change=case.get("change"))
    if "lora" in case:
        model = adapted(model, **case["lora"]).double()
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return model


def compared(case: dict[str, Any], meshes: Meshes) -> tuple[float, float, str]:
    """Relative differences of the hidden states and of the worst gradient, and whose that is."""
    whole, divided = model_of(case), model_of(case)
    partial = apply_tensor_parallel(divided, meshes, case.get("plan"))
    apply_expert_parallel(divided, meshes)
    batches = [tokens_of(LENGTH + 4 * place, place) for place in range(case.get("micro_batches", 1))]
    for tokens in batches:
        loss_of(whole, tokens).backward()
        loss_of(divided, tokens, meshes).backward()
    with torch.no_grad():
        wanted, found = hidden_states(whole, batches[0]), hidden_states(divided, batches[0])
    if meshes.sizes.sequence:
        wanted = wanted.chunk(meshes.sizes.tensor)[dist.get_rank(meshes.tensor)]
    gradients = {name: parameter.grad for name, parameter in divided.named_parameters()}
    for name in partial:
        if gradients[name] is not None:
            dist.all_reduce(gradients[name], group=meshes.tensor)
    worst, name = difference(
        {name: whole_gradient(parameter) for name, parameter in divided.named_parameters()},
        {name: whole_gradient(parameter) for name, parameter in whole.named_parameters()},
    )
    return float((found - wanted).abs().max() / wanted.abs().max()), worst, name


def every_case(rank: int, sequence: bool) -> dict[str, tuple[float, float, str]]:
    meshes = Meshes(ParallelSizes(tensor=2, sequence=sequence), "cpu")
    return {name: compared(case, meshes) for name, case in CASES.items() if case.get("only", sequence) == sequence}


@pytest.mark.parametrize("sequence", [False, True])
def test_a_model_divided_among_two_ranks_has_the_hidden_states_and_gradients_of_one_process(sequence: bool) -> None:
    for found in on_ranks(2, every_case, sequence):
        assert {name: worst for name, worst in found.items() if max(worst[:2]) > BOUND} == {}
