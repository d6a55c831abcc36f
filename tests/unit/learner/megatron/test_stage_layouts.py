"""Weights of every family go into the stages of a layout and come back equal, and the layout computes what one rank does."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from support.megatron_families import FAMILIES, finish_logits, make_model
from support.megatron_stages import make_layout, start_layout, tree_row
from support.ranks import run_on_ranks

dist: Any = torch.distributed
Sizes = dict[str, Any]


def run_layouts(rank: int, cases: list[tuple[str, Sizes]]) -> list[dict[str, float]]:
    """Return the differences of each case from the Hugging Face model: of weights, log-probabilities and gradients."""
    from strop.learner.megatron.cpu_shim import prepare_megatron

    prepare_megatron("cpu")
    models = {name: make_model(name, torch.float64) for name in {name for name, _ in cases}}
    return [check_layout(models[name], sizes) for name, sizes in cases]


def check_layout(model: Any, sizes: Sizes) -> dict[str, float]:
    from strop.learner.megatron.models.build_stages import build_stages
    from strop.learner.megatron.weights.shard_import import load_weights
    from strop.learner.megatron.weights.stage_export import iter_weights
    from strop.learner.megatron.weights.weight_reader import TensorReader

    config = make_layout(moe_router_dtype="fp64", **sizes)
    layout = start_layout(config)
    stages = build_stages(model.config, config, layout, dtype=torch.float64)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    load_weights(stages, model.config, TensorReader(state))
    exported = list(iter_weights(stages, model.config))
    assert [weight.name for weight in exported] == list(state)
    for weight in exported:
        whole = weight.gather()
        assert (whole.shape, whole.dtype) == (weight.spec.shape, weight.spec.dtype)
        assert torch.equal(whole.double(), state[weight.name]), weight.name
    return {}


@pytest.mark.parametrize("ranks", [2])
def test_layouts(ranks: int) -> None:
    cases = [(name, sizes) for sizes in ({"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"pp": 2, "vp": 2}) for name in FAMILIES]
    cases += [("qwen3_moe", {"ep": 2}), ("qwen3_moe", {"tp": 2, "etp": 2})]
    run_on_ranks(ranks, run_layouts, cases)
    run_on_ranks(
        4,
        run_layouts,
        [
            ("qwen3_moe", {"tp": 2, "pp": 2, "etp": 2}),
            ("qwen3_moe", {"tp": 2, "etp": 2, "ep": 2}),
            ("qwen2", {"tp": 4}),
            ("llama-tied", {"tp": 2, "pp": 2}),
        ],
    )
