"""Recurrent layers on two ranks: training is that of one process, in float64."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.models.network import Network
from support.every_family import make_config
from support.models import CONFIGS
from support.parity import Case, TrainingResult, compare, make_batch, shorter, train
from support.ranks import run_on_ranks
from support.sharded import Float64Torch
from support.sweep import sweep

pytestmark = pytest.mark.slow

MIXERS = "mixers/"  # before the name of a family
SHARDED, STAGES = ParallelDims(shard=2), ParallelDims(pipeline=2)
TENSOR, CONTEXT = ParallelDims(tensor=2), ParallelDims(context=2)
CASES = {
    "qwen3_5 shard": ("qwen3_5", SHARDED),
    "qwen3_5 recomputed": ("qwen3_5", SHARDED),
    "qwen3_5 tensor": ("qwen3_5", TENSOR),
    "qwen3_5 context": ("qwen3_5", CONTEXT),
    "nemotron_h context": ("nemotron_h", CONTEXT),
    "jamba context": ("jamba", CONTEXT),
    "qwen3_5 stages": ("qwen3_5", STAGES),
    "qwen3_5 lora": ("qwen3_5", SHARDED),
    "nemotron_h shard": ("nemotron_h", SHARDED),
    "qwen3_next experts": ("qwen3_next", ParallelDims(shard=2, expert=2)),
    "lfm2 shard": ("lfm2", SHARDED),
    "gemma4 recomputed": ("gemma4", SHARDED),
    "gemma4 tensor": ("gemma4", TENSOR),
    "gemma4 context": ("gemma4", CONTEXT),
    "gemma4_moe stages": ("gemma4_moe", STAGES),
    "gemma4_moe experts": ("gemma4_moe", ParallelDims(shard=2, expert=2)),
}


def compute_in_float64(network: Network) -> None:
    """Let modeling code compute in float64 where it asks for float32, for the rest of this process."""
    narrow = torch.Tensor.float
    torch.Tensor.float = lambda values: values if values.dtype == torch.float64 else narrow(values)  # type: ignore[assignment, method-assign]
    for module in network.model.modules():
        code: Any = sys.modules[type(module).__module__]
        if code.__name__.startswith("transformers.models."):
            code.torch = Float64Torch()
    network.model.config._experts_implementation = "eager"


def train_both_ways(rank: int, name: str) -> tuple[TrainingResult, TrainingResult | None, int]:
    family, sizes = CASES[name]
    CONFIGS[MIXERS + family] = partial(make_config, family)
    case = shorter(
        Case(
            sizes=sizes,
            family=MIXERS + family,
            branches=True,
            change=compute_in_float64,
            checkpointing="recomputed" in name,
            lora="lora" in name,
        )
    )
    batch = make_batch(case)
    trained = train(case, batch, DeviceMeshes(sizes, "cpu"))
    return trained, train(replace(case, checkpointing=False), batch) if rank == 0 else None, len(batch.target)


@pytest.mark.parametrize("name", sweep(CASES, "qwen3_5 recomputed", "qwen3_5 context", "jamba context", "qwen3_5 stages"))
def test_training_on_two_ranks_is_training_in_one_process(name: str) -> None:
    ranks = run_on_ranks(2, train_both_ways, name)
    single, size = ranks[0][1], ranks[0][2]
    assert single is not None
    found = compare([trained for trained, _, _ in ranks], single, size)
    assert found.loss < 1e-9 and found.norm < 1e-9 and found.outputs < 1e-6 and found.weights < 1e-9, found
