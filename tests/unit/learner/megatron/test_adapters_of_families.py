"""Adapters of every family: hidden states of a model with adapters are those of the merged one, gradients follow from its gradients."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from support.megatron_families import FAMILIES, make_model
from support.megatron_stages import make_layout, run_stages, start_layout, tree_row
from support.needs import needs_megatron
from support.ranks import run_on_ranks
from unit.learner.megatron.test_stage_layouts import EXACT, MIXTURES, ROUTED, relative

needs_megatron()
dist: Any = torch.distributed
SIZES: dict[str, dict[str, Any]] = {
    "tensor": {"tp": 2},
    "sequence": {"tp": 2, "sp": True},
    "experts": {"tp": 2, "sp": True, "ep": 2},
}


def check_families(rank: int, names: list[str], kinds: list[str]) -> dict[tuple[str, str], tuple[float, float]]:
    from strop.learner.megatron.cpu_shim import prepare_megatron

    prepare_megatron("cpu")
    return {(name, kind): check_family(name, SIZES[kind]) for name in names for kind in kinds if fits(name, kind)}


def fits(name: str, kind: str) -> bool:
    return kind == "sequence" or (name in MIXTURES) == (kind == "experts")


def check_family(name: str, sizes: dict[str, Any]) -> tuple[float, float]:
    """Return the relative differences of hidden states, and the largest one of gradients."""
    from strop.learner.megatron.adapters.stage_adapters import StageAdapters
    from strop.learner.megatron.megatron_peft_config import MegatronPeftConfig
    from strop.learner.megatron.models.build_stages import build_stages
    from strop.learner.megatron.models.stage_row import StageRow
    from strop.learner.megatron.weights.shard_import import load_weights
    from strop.learner.megatron.weights.stage_export import gather_weight, iter_weights
    from strop.learner.megatron.weights.weight_reader import MemoryWeights

    model, peft = make_model(name, torch.float64), MegatronPeftConfig(enabled=True, dim=3, alpha=3)
    config = make_layout(moe_router_dtype="fp64", peft=peft, **sizes)
    tokens, positions, plan = tree_row(model.config.vocab_size)
    row = StageRow(tokens, positions, plan)

    def build(weights: dict[str, Tensor]) -> Any:
        stages = build_stages(model.config, config, layout, dtype=torch.float64)
        load_weights(stages, model.config, MemoryWeights(weights))
        return stages

    def run(stages: Any) -> Tensor:
        hidden = run_stages(stages, row)[:, 0]
        first = layout.tensor.rank() * len(hidden) if len(hidden) < len(tokens) else 0
        loss = torch.randn(len(tokens), hidden.shape[1], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        (hidden * loss[first : first + len(hidden)]).sum().backward()
        for parameter_name, parameter in stages[0].named_parameters():  # what finalize_model_grads adds
            of_heads = stages[0].config.qk_layernorm and ("q_layernorm" in parameter_name or "k_layernorm" in parameter_name)
            if (getattr(parameter, "sequence_parallel", False) or of_heads) and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=layout.tensor)
        return hidden.detach()

    def gradient(parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    layout = start_layout(config)
    with layout.activate():
        stages = build(dict(model.state_dict()))
        adapters = StageAdapters(stages, model.config, peft, base="base")
        generator = torch.Generator().manual_seed(1)
        drawn = {
            key: 0.1 * torch.randn(value.shape, generator=generator, dtype=torch.float64) if "lora_B" in key else value.clone()
            for key, value in adapters.gather().items()
        }
        adapters.load(MemoryWeights(drawn))
        merged_stages = build({weight.name: weight.gather() for weight in adapters.iter_merged()})
        found, wanted = run(stages), run(merged_stages)
        dense = {weight.name: weight.gather() for weight in iter_weights(merged_stages, model.config, gradient)}
        downs: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        for each in adapters.adapted:
            downs[each.layer] = downs[each.layer] + drawn[each.up.weight.name].t() @ dense[each.placed.weight.name]
        differences = []
        for each in adapters.adapted:
            up = dense[each.placed.weight.name] @ drawn[each.down.weight.name].t()
            for half, expected in ((each.up, up), (each.down, downs[each.layer])):
                differences.append(relative(gather_weight(half, adapters.weights, gradient) - expected, expected))
    return relative(found - wanted, wanted), max(differences)


def check(names: list[str], kinds: list[str]) -> None:
    for results in run_on_ranks(2, check_families, names, kinds):
        for (name, kind), differences in results.items():
            assert max(differences) < (ROUTED if name in MIXTURES else 10 * EXACT), (name, kind, differences)


@pytest.mark.exhaustive
def test_latent_attention_shared_experts_and_post_norms() -> None:
    check(["deepseek_v3", "qwen2_moe", "gemma2"], ["sequence"])


@pytest.mark.exhaustive
def test_every_family() -> None:
    check(list(FAMILIES), list(SIZES))
