"""Recurrent layers and sparse attention on two ranks: training is that of one process, in float64."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.models.mixers.chosen_tokens import pack_bits
from strop.models.network import Network
from strop.models.routing.router_config import CHOICES
from strop.types import Batch
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
    "glm_moe_dsa shard": ("glm_moe_dsa", SHARDED),
    "glm_moe_dsa recomputed": ("glm_moe_dsa", SHARDED),
    "deepseek_v32 tensor": ("deepseek_v32", TENSOR),
    "glm_moe_dsa context": ("glm_moe_dsa", CONTEXT),
    "deepseek_v32 ring": ("deepseek_v32", CONTEXT),
    "deepseek_v32 stages": ("deepseek_v32", STAGES),
    "glm_moe_dsa stages": ("glm_moe_dsa", STAGES),
    "deepseek_v32 lora": ("deepseek_v32", SHARDED),
    "glm_moe_dsa replayed": ("glm_moe_dsa", CONTEXT),
    "deepseek_v32 replayed": ("deepseek_v32", ParallelDims(tensor=2, sequence=True)),
    "glm_moe_dsa experts": ("glm_moe_dsa", ParallelDims(shard=2, expert=2)),
}


OPTIONS = {"deepseek_v32 ring": {"num_attention_heads": 3, "num_key_value_heads": 3}}  # which do not divide


def compute_in_float64(network: Network) -> None:
    """Let modeling code compute in float64 where it asks for float32, for the rest of this process."""
    narrow = torch.Tensor.float
    torch.Tensor.float = lambda values: values if values.dtype == torch.float64 else narrow(values)  # type: ignore[assignment, method-assign]
    for module in network.model.modules():
        code: Any = sys.modules[type(module).__module__]
        if code.__name__.startswith("transformers.models."):
            code.torch = Float64Torch()
    network.model.config._experts_implementation = "eager"


def replay_choices(network: Network) -> None:
    compute_in_float64(network)
    network.enable_indexer_replay(64)


def record_choices(batch: Batch, layers: int) -> Batch:
    """As if an engine had chosen any tokens for most tokens, always with the token itself."""
    drawn = torch.rand(len(batch.tokens), layers, 64, generator=torch.Generator().manual_seed(0)) < 0.3
    drawn.scatter_(2, batch.positions[:, None, None].expand(-1, layers, 1), True)
    choices = pack_bits(drawn.flatten(0, 1), 8).unflatten(0, (-1, layers))
    choices[::7] = 0  # nothing was recorded
    return replace(batch, read_columns={CHOICES.name: choices})


def train_both_ways(rank: int, name: str) -> tuple[TrainingResult, TrainingResult | None, int]:
    family, sizes = CASES[name]
    CONFIGS[MIXERS + family] = partial(make_config, family, **OPTIONS.get(name, {}))
    case = shorter(
        Case(
            sizes=sizes,
            family=MIXERS + family,
            branches=True,
            change=replay_choices if "replayed" in name else compute_in_float64,
            checkpointing="recomputed" in name,
            lora="lora" in name,
        )
    )
    batch = make_batch(case)
    if "replayed" in name:
        batch = record_choices(batch, layers=2 if family == "glm_moe_dsa" else 3)
    trained = train(case, batch, DeviceMeshes(sizes, "cpu"))
    return trained, train(replace(case, checkpointing=False), batch) if rank == 0 else None, len(batch.target)


@pytest.mark.parametrize("name", sweep(CASES, "qwen3_5 recomputed", "qwen3_5 context", "jamba context", "qwen3_5 stages"))
def test_training_on_two_ranks_is_training_in_one_process(name: str) -> None:
    ranks = run_on_ranks(2, train_both_ways, name)
    single, size = ranks[0][1], ranks[0][2]
    assert single is not None
    found = compare([trained for trained, _, _ in ranks], single, size)
    assert found.loss < 1e-9 and found.norm < 1e-9 and found.outputs < 1e-6 and found.weights < 1e-9, found
