"""Expert parallelism: what experts on other ranks compute, and the gradients they get, are those of one process over all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.models import build
from tests.support.ranks import run_on_ranks
from tests.support.sharded import (
    build_float64_model,
    compute_hidden_states,
    compute_loss,
    gather_gradient,
    largest_relative_difference,
    random_tokens,
)

from strop.learner.parallel.expert_parallel import apply_expert_parallel, check_experts
from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.learner.parallel.tensor_parallel import apply_tensor_parallel
from strop.models.attention.attention_interface import IMPLEMENTATION
from support.sweep import sweep

pytestmark = pytest.mark.slow

dist: Any = torch.distributed
BOUND = 1e-12  # float64, relative to each parameter's largest entry
LENGTHS = (28, 8)  # of each data rank's tokens: the second has few


def unevenly_routed(model: Any) -> Any:
    """Every token goes to the experts of the first of two ranks."""
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias[2:] = -100.0
    return model


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def exact_mixture() -> Any:
    return build_float64_model("qwen3_moe")


def exact_latent() -> Any:
    return build_float64_model("deepseek_v3", tied=True)


def exact_uneven() -> Any:
    return unevenly_routed(build_float64_model("deepseek_v3"))


def exact_checkpointed() -> Any:
    return checkpointed(unevenly_routed(build_float64_model("deepseek_v3")))


def exact_frozen() -> Any:
    """Only what comes before and after experts is trained."""
    model = build_float64_model("qwen3_moe")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    return model


MODELS = {make.__name__: make for make in (exact_mixture, exact_latent, exact_uneven, exact_checkpointed, exact_frozen)}


def gradients_of(model: Any, meshes: DeviceMeshes, partial: frozenset[str], divided: frozenset[str]) -> dict[str, torch.Tensor]:
    """Sums over the ranks, as a learner takes them: over data for most, over those that share a part of the experts for these."""
    found = {}
    for name, parameter in model.named_parameters():
        own = parameter.grad
        if own is None:
            assert not parameter.requires_grad, f"{name} has no gradient, and others with it would wait for one"
            own = parameter.grad = torch.zeros_like(parameter)
        own = own.to_local() if hasattr(own, "to_local") else own
        if name in partial:
            dist.all_reduce(own, group=meshes.tensor)
        mesh = meshes.experts["expert_shard"] if name.rpartition(".")[0] in divided else meshes.dense["shard"]
        dist.all_reduce(own, group=mesh.get_group())
        found[name] = gather_gradient(parameter)
    return found


def gradients_of_unused(model: Any, gradients: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Those of the second rank's experts, in a model that sends them nothing."""
    uneven = any((getattr(module, "e_score_correction_bias", torch.zeros(1)) < -1).any() for module in model.modules())
    return [gradient[2:] for name, gradient in gradients.items() if ".experts." in name and uneven]


def compared(model: Any, divided: Any, meshes: DeviceMeshes) -> tuple[float, float, str]:
    """Relative differences of the hidden states and of the worst gradient, and whose that is."""
    partial = apply_tensor_parallel(divided, meshes)
    experts = apply_expert_parallel(divided, meshes)
    assert experts
    for place, length in enumerate(LENGTHS):
        compute_loss(model, random_tokens(length, place)).backward()
    own = random_tokens(LENGTHS[meshes.data_rank], meshes.data_rank)
    compute_loss(divided, own, meshes).backward()
    with torch.no_grad():
        wanted, found = compute_hidden_states(model, own), compute_hidden_states(divided, own)
    if meshes.dims.sequence:
        wanted = wanted.chunk(meshes.dims.tensor)[dist.get_rank(meshes.tensor)]
    gradients = {name: gather_gradient(parameter) for name, parameter in model.named_parameters()}
    if unused := gradients_of_unused(model, gradients):
        assert not any(gradient.any() for gradient in unused)
    worst, name = largest_relative_difference(gradients_of(divided, meshes, partial, experts), gradients)
    return float((found - wanted).abs().max() / wanted.abs().max()), worst, name


def every_model(rank: int, sizes: ParallelDims, names: tuple[str, ...]) -> dict[str, tuple[float, float, str]]:
    meshes = DeviceMeshes(sizes, "cpu")
    return {name: compared(MODELS[name](), MODELS[name](), meshes) for name in names}


def test_experts_divided_over_ranks_with_different_tokens_are_those_of_one_process_over_all_of_them() -> None:
    for found in run_on_ranks(2, every_model, ParallelDims(shard=2, expert=2), tuple(MODELS)):
        assert {name: worst for name, worst in found.items() if max(worst[:2]) > BOUND} == {}


Divided = tuple[str, int, bool]  # a model, the ranks that share its experts, whether rows are divided as well

KEPT: tuple[Divided, ...] = (("exact_mixture", 1, True), ("exact_uneven", 2, False), ("exact_mixture", 4, True))
ALL: tuple[Divided, ...] = (  # without rows that are divided for ``exact_uneven``, whose plan leaves the attention whole
    *KEPT,
    ("exact_mixture", 2, False),
    ("exact_mixture", 2, True),
    ("exact_mixture", 4, False),
    ("exact_uneven", 4, False),
)


def four_ranks(rank: int, cases: tuple[Divided, ...]) -> dict[Divided, tuple[float, float, str]]:
    found = {}
    for name, expert, sequence in cases:
        sizes = ParallelDims(shard=2, tensor=2, expert=expert, sequence=sequence)
        found[name, expert, sequence] = compared(MODELS[name](), MODELS[name](), DeviceMeshes(sizes, "cpu"))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", sweep([KEPT, ALL], KEPT), ids=lambda cases: f"{len(cases)} layouts")
def test_experts_are_divided_further_than_layers_or_as_far(cases: tuple[Divided, ...]) -> None:
    for found in run_on_ranks(4, four_ranks, cases):
        assert {name: worst for name, worst in found.items() if max(worst[:2]) > BOUND} == {}


def in_float32(rank: int, implementation: str) -> tuple[float, float, str]:
    meshes = DeviceMeshes(ParallelDims(shard=2, expert=2), "cpu")
    models = [build("qwen3_moe"), build("qwen3_moe")]
    for model in models:
        model.set_attn_implementation(IMPLEMENTATION)
        model.config._experts_implementation = implementation
    return compared(*models, meshes)


def several_implementations(rank: int) -> dict[str, tuple[float, float, str]]:
    return {name: in_float32(rank, name) for name in ("grouped_mm", "batched_mm", "eager")}


@pytest.mark.exhaustive
def test_every_implementation_of_experts_serves_a_rank_that_has_some_of_them() -> None:
    for found in run_on_ranks(2, several_implementations):
        assert {name: worst for name, worst in found.items() if max(worst[:2]) > 1e-4} == {}


def test_experts_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="expert_parallel_size 3 does not divide the 4 experts of model"):
        check_experts(build("qwen3_moe"), ParallelDims(shard=3, expert=3))
    with pytest.raises(ValueError, match="tensor_parallel_size, which shards experts too, 3 does not divide the 4 experts"):
        check_experts(build("qwen3_moe"), ParallelDims(tensor=3))
    with pytest.raises(ValueError, match="expert_parallel_size is 2 and LlamaForCausalLM has no expert layers; set it to 1"):
        check_experts(build("llama"), ParallelDims(shard=2, expert=2))
    odd = build("qwen3_moe")
    odd.model.layers[1].mlp.experts.scale = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.experts \(Qwen3MoeExperts\) have a layout that cannot be sharded"):
        check_experts(odd, ParallelDims(shard=2, expert=2))
