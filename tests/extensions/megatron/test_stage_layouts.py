"""Every layout of every family: weights go in and come back equal, hidden states and gradients are those of Transformers' model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.megatron_families import FAMILIES, make_model
from support.megatron_stages import make_layout, read_tree, run_stages, start_layout, tree_row
from support.needs import needs_megatron
from support.ranks import run_on_ranks

needs_megatron()
dist: Any = torch.distributed
Sizes = dict[str, Any]
Case = tuple[str, Sizes]

EXACT = 1e-12  # relative, in float64
ROUTED = 2e-6  # Transformers and Megatron Core compute the weights of experts in float32, in another order
ROUTED_DELTA = 6e-6  # whose rounding a delta rule amplifies
MIXTURES = (
    *("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v2", "deepseek_v3", "deepseek_v3-yarn", "glm4_moe", "gpt_oss"),
    *("qwen3_next", "qwen3_5_moe", "nemotron_h-moe", "deepseek_v32", "glm_moe_dsa"),
)


def check_cases(rank: int, cases: list[Case]) -> list[tuple[float, float]]:
    """Return the relative differences of hidden states and of gradients for each case."""
    from strop.extensions.megatron.cpu_shim import prepare_megatron

    prepare_megatron("cpu")
    models = {name: make_model(name, torch.float64) for name in sorted({name for name, _ in cases})}
    return [check_layout(models[name], sizes) for name, sizes in cases]


def check_layout(model: Any, sizes: Sizes) -> tuple[float, float]:
    from strop.extensions.megatron.models.build_stages import build_stages
    from strop.extensions.megatron.models.gpt_stage import StageRow
    from strop.extensions.megatron.weight_map import MemoryWeights, load_weights

    config = make_layout(moe_router_dtype="fp64", **sizes)
    layout = start_layout(config)
    with layout.activate():
        stages = build_stages(model.config, config, layout, dtype=torch.float64)
        load_weights(stages, model.config, MemoryWeights({name: tensor.detach() for name, tensor in model.state_dict().items()}))
        check_export(model, stages)
        tokens, positions, plan = tree_row(model.config.vocab_size)
        expected = read_tree(model, tokens, positions, plan)
        hidden = run_stages(stages, StageRow(tokens, positions, plan))[:, 0]
        first = layout.tensor.rank() * len(hidden) if len(hidden) < len(tokens) else 0
        rows = slice(first, first + len(hidden))
        difference = relative((hidden - expected[rows]).detach(), expected.detach())
        if "pp" in sizes:
            return difference, 0.0
        return difference, check_gradients(model, stages, hidden, expected, rows, config)


def check_export(model: Any, stages: Any) -> None:
    from strop.extensions.megatron.weight_map import iter_weights

    state = model.state_dict()
    exported = list(iter_weights(stages, model.config))
    assert [weight.name for weight in exported] == list(state)
    tied = {weight.name for weight in exported if weight.storage_key == exported[0].storage_key}
    assert ("lm_head.weight" in tied) == model.config.tie_word_embeddings
    for weight in exported:
        whole = weight.gather()
        assert (whole.shape, whole.dtype) == (weight.spec.shape, weight.spec.dtype), weight.name
        assert torch.equal(whole, state[weight.name].to(whole.dtype)), weight.name


def check_gradients(model: Any, stages: Any, hidden: Tensor, expected: Tensor, rows: slice, config: Any) -> float:
    """Return the largest difference of a gradient of a random sum of hidden states."""
    from strop.extensions.megatron.weight_map import iter_weights

    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    model.zero_grad()
    (expected * weights).sum().backward()
    (hidden * weights[rows]).sum().backward()
    for name, parameter in stages[0].named_parameters():  # what finalize_model_grads adds
        of_heads = stages[0].config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        if (getattr(parameter, "sequence_parallel", False) or of_heads) and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=stages[0].pg_collection.tp)
    parameters = dict(model.named_parameters())
    replicas = stages[0].pg_collection.dp.size()  # they read the same row, and experts see the tokens of all
    differences = []
    for weight in iter_weights(stages, model.config, lambda each: torch.zeros_like(each) if each.grad is None else each.grad):
        found, wanted = weight.gather(), parameters.get(weight.name)
        if wanted is None or wanted.grad is None:
            continue
        if ".experts." in weight.name and config.expert_model_parallel_size > 1:
            found = found / replicas
        differences.append(relative(found - wanted.grad, wanted.grad))
    return max(differences)


def relative(difference: Tensor, size: Tensor) -> float:
    return float(difference.abs().max() / size.abs().max())


def check(ranks: int, cases: list[Case]) -> None:
    for results in run_on_ranks(ranks, check_cases, cases):
        for (name, sizes), differences in zip(cases, results, strict=True):
            routed = ROUTED_DELTA if name in ("qwen3_next", "qwen3_5_moe") else ROUTED
            assert max(differences) < (routed if name in MIXTURES else EXACT), (name, sizes, differences)


def test_one_rank_has_the_numbers_of_every_family() -> None:
    check(1, [(name, {}) for name in FAMILIES])


FAULTS = {  # family -> (parameter of the first layer, its row that is wrong, the weight that has it)
    "qwen3_5": ("self_attention.in_proj.weight", -1, "linear_attn.in_proj_a.weight"),
    "qwen3_next": ("self_attention.in_proj.weight", -1, "linear_attn.in_proj_ba.weight"),
    "nemotron_h": ("self_attention.conv1d.bias", 3, "mixer.conv1d.bias"),
    "gpt_oss": ("self_attention.core_attention.softmax_offset", 1, "self_attn.sinks"),
}


def export_faults(rank: int) -> dict[str, list[str]]:
    """Return the weights that are exported wrong for each fault."""
    from strop.extensions.megatron.cpu_shim import prepare_megatron

    prepare_megatron("cpu")
    from strop.extensions.megatron.models.build_stages import build_stages
    from strop.extensions.megatron.weight_map import MemoryWeights, iter_weights, load_weights

    found = {}
    for name, (parameter, row, _) in FAULTS.items():
        model = make_model(name, torch.float64)
        state, config = {key: tensor.detach() for key, tensor in model.state_dict().items()}, make_layout()
        layout = start_layout(config)
        with layout.activate(), torch.no_grad():
            stages = build_stages(model.config, config, layout, dtype=torch.float64)
            load_weights(stages, model.config, MemoryWeights(state))
            stages[0].get_parameter(f"decoder.layers.0.{parameter}")[row] += 1e-9
            exported = {weight.name: weight.gather() for weight in iter_weights(stages, model.config)}
        found[name] = [key for key, tensor in state.items() if not torch.equal(exported[key], tensor)]
    return found


def test_a_wrong_row_of_a_parameter_is_exported_in_the_weight_that_has_it() -> None:
    [found] = run_on_ranks(1, export_faults)
    assert found == {name: [f"model.layers.0.{weight}"] for name, (_, _, weight) in FAULTS.items()}


@pytest.mark.exhaustive
def test_two_ranks() -> None:
    """Each way of dividing, of some families; and one that is not divided, on ranks that read the same row."""
    divided: list[Case] = [
        ("llama-3.1", {"tp": 2}),
        ("qwen3", {"tp": 2}),
        ("gemma3", {"tp": 2, "sp": True}),
        ("deepseek_v3", {"tp": 2, "sp": True, "etp": 2}),
        ("qwen2", {"pp": 2}),
        ("qwen3_moe", {"ep": 2}),
        ("deepseek_v2", {"pp": 2, "vp": 2}),
        ("qwen3_next", {"tp": 2, "sp": True, "etp": 2}),
        ("qwen3_5", {"tp": 2}),
        ("qwen3_5_moe", {"ep": 2}),
        ("nemotron_h", {"tp": 2, "sp": True}),
        ("nemotron_h-moe", {"pp": 2, "vp": 2}),
        ("gpt_oss", {"tp": 2, "sp": True, "ep": 2}),
        ("deepseek_v32", {"tp": 2, "sp": True, "etp": 2}),
        ("glm_moe_dsa", {"pp": 2}),
    ]
    check(2, [("qwen2_moe", {}), *divided])
