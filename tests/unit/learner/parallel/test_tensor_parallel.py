"""Tensor parallelism: every rank's hidden states and gradients are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.lora import with_random_adapters
from tests.support.ranks import run_on_ranks
from tests.support.sharded import (
    build_float64_model,
    compute_hidden_states,
    compute_loss,
    gather_gradient,
    largest_relative_difference,
    random_tokens,
)
from torch.distributed.tensor import DTensor

from strop.learner.parallel.expert_parallel import apply_expert_parallel
from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.learner.parallel.tensor_parallel import apply_tensor_parallel
from strop.models.adapters import disable_adapters
from support.sweep import sweep

pytestmark = pytest.mark.slow

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
    model = build_float64_model(case["family"], tied=case.get("tied", False), change=case.get("change"))
    if "lora" in case:
        model = with_random_adapters(model, **case["lora"]).double()
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return model


def differing(model: Any, partial: frozenset[str], meshes: DeviceMeshes) -> list[str]:
    """Parameters with a gradient that should be the same on all tensor ranks, to the last bit, and is not."""
    found = []
    for name, parameter in model.named_parameters():
        if name not in partial and parameter.grad is not None and not isinstance(parameter, DTensor):
            other = parameter.grad.clone()
            dist.broadcast(other, group=meshes.tensor, group_src=0)
            found += [] if torch.equal(other, parameter.grad) else [name]
    return found


def compared(case: dict[str, Any], meshes: DeviceMeshes) -> tuple[float, float, str]:
    """Relative differences of the hidden states and of the worst gradient, and whose that is."""
    whole, divided = model_of(case), model_of(case)
    partial = apply_tensor_parallel(divided, meshes, case.get("plan"))
    apply_expert_parallel(divided, meshes)
    batches = [random_tokens(LENGTH + 4 * place, place) for place in range(case.get("micro_batches", 1))]
    for tokens in batches:
        compute_loss(whole, tokens).backward()
        compute_loss(divided, tokens, meshes).backward()
    with torch.no_grad():
        wanted, found = compute_hidden_states(whole, batches[0]), compute_hidden_states(divided, batches[0])
    if meshes.dims.sequence:
        wanted = wanted.chunk(meshes.dims.tensor)[dist.get_rank(meshes.tensor)]
    gradients = {name: parameter.grad for name, parameter in divided.named_parameters()}
    assert differing(divided, partial, meshes) == []
    for name in partial:
        if gradients[name] is not None:
            dist.all_reduce(gradients[name], group=meshes.tensor)
    worst, name = largest_relative_difference(
        {name: gather_gradient(parameter) for name, parameter in divided.named_parameters()},
        {name: gather_gradient(parameter) for name, parameter in whole.named_parameters()},
    )
    return float((found - wanted).abs().max() / wanted.abs().max()), worst, name


# In `make test` models of one kind are one, and what others cover at the same time is left out.
OTHERS = ("llama", "qwen2", "qwen3", "llama, checkpointing", "llama, two micro-batches", "phi3")


def every_case(rank: int, sequence: bool, kept: bool) -> dict[str, tuple[float, float, str]]:
    meshes = DeviceMeshes(ParallelDims(tensor=2, sequence=sequence), "cpu")
    cases = {name: case for name, case in CASES.items() if not kept or name not in OTHERS}
    return {name: compared(case, meshes) for name, case in cases.items() if case.get("only", sequence) == sequence}


@pytest.mark.parametrize("sequence", sweep([False, True], True))
@pytest.mark.parametrize("kept", sweep([False, True], True))
def test_a_model_divided_among_two_ranks_has_the_hidden_states_and_gradients_of_one_process(sequence: bool, kept: bool) -> None:
    for found in run_on_ranks(2, every_case, sequence, kept):
        assert {name: worst for name, worst in found.items() if max(worst[:2]) > BOUND} == {}


def without_adapters(rank: int, sequence: bool) -> float:
    """The largest difference of hidden states to those of a model that never had adapters."""
    meshes = DeviceMeshes(ParallelDims(tensor=2, sequence=sequence), "cpu")
    whole, divided = build_float64_model("llama", change=BIASES), model_of(CASES["llama, adapters"])
    apply_tensor_parallel(divided, meshes)
    with torch.no_grad(), disable_adapters(divided):
        found, wanted = (
            compute_hidden_states(divided, random_tokens(LENGTH, 0)),
            compute_hidden_states(whole, random_tokens(LENGTH, 0)),
        )
    if sequence:
        wanted = wanted.chunk(2)[rank]
    return float((found - wanted).abs().max() / wanted.abs().max())


def without_adapters_both_ways(rank: int) -> list[float]:
    return [without_adapters(rank, sequence) for sequence in (False, True)]


def test_a_divided_model_with_its_adapters_off_is_its_base() -> None:
    for found in run_on_ranks(2, without_adapters_both_ways):
        assert max(found) < BOUND


def with_dropout(rank: int, sequence: bool, position: str) -> tuple[bool, bool, list[str]]:
    """Whether the tensor ranks computed the same loss, whether dropout did anything, and gradients that differ."""
    meshes = DeviceMeshes(ParallelDims(tensor=2, sequence=sequence), "cpu")
    case = CASES["deepseek_v3, latent, adapters" if sequence else "deepseek_v3, adapters"]
    lora = case["lora"] | {"dropout": 0.5, "dropout_position": position}
    model = model_of(case | {"lora": lora, "checkpointing": True})
    partial = apply_tensor_parallel(model, meshes, case.get("plan"))
    apply_expert_parallel(model, meshes)
    torch.manual_seed(1)  # what its docstring asks for
    losses = [compute_loss(model, random_tokens(LENGTH, 0), meshes) for _ in range(2)]
    losses[1].backward()
    other = losses[1].detach().clone()
    dist.broadcast(other, group=meshes.tensor, group_src=0)
    return bool(other == losses[1]), bool(losses[0] != losses[1]), differing(model, partial, meshes)


def all_dropouts(rank: int) -> list[tuple[bool, bool, list[str]]]:
    return [with_dropout(rank, sequence, position) for sequence in (False, True) for position in ("pre", "post")]


@pytest.mark.exhaustive
def test_tensor_ranks_agree_under_dropout_when_their_generators_do() -> None:
    for found in run_on_ranks(2, all_dropouts):
        assert found == [(True, True, [])] * 4


class Scaled(torch.nn.Module):
    """An MLP that does something with its sum."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = inner.gate_proj, inner.up_proj, inner.down_proj, inner.act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def work_on_a_sum(rank: int) -> str:
    model = build_float64_model("llama")
    model.model.layers[1].mlp = Scaled(model.model.layers[1].mlp)
    apply_tensor_parallel(model, meshes := DeviceMeshes(ParallelDims(tensor=2), "cpu"))
    with pytest.raises(RuntimeError) as failure:
        compute_loss(model, random_tokens(LENGTH, 0), meshes)
    return str(failure.value)


def test_a_module_that_works_on_its_sum_is_refused_when_it_first_does() -> None:
    for found in run_on_ranks(2, work_on_a_sum):
        assert found.startswith("model.layers.1.mlp (Scaled) does not return the sum of its sharded layers unchanged")


def shapes_alone(rank: int) -> dict[str, tuple[list[int], str]]:
    with torch.device("meta"):
        model = build_float64_model("qwen3_moe")
    meshes = DeviceMeshes(ParallelDims(tensor=2), "cpu")
    apply_tensor_parallel(model, meshes)
    apply_expert_parallel(model, meshes)
    found = {name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
    return {name: (list(parameter.to_local().shape), parameter.device.type) for name, parameter in found.items() if ".0." in name}


def test_a_model_without_weights_is_divided_by_its_shapes() -> None:
    layer = "model.layers.0"
    for found in run_on_ranks(2, shapes_alone):
        assert found == {
            f"{layer}.self_attn.q_proj.weight": ([16, 32], "meta"),
            f"{layer}.self_attn.k_proj.weight": ([8, 32], "meta"),
            f"{layer}.self_attn.v_proj.weight": ([8, 32], "meta"),
            f"{layer}.self_attn.o_proj.weight": ([32, 16], "meta"),
            f"{layer}.mlp.experts.gate_up_proj": ([2, 48, 32], "meta"),
            f"{layer}.mlp.experts.down_proj": ([2, 32, 24], "meta"),
        }
