"""Fake quantisation on many ranks: each rounds its shards as one process rounds the whole tensor, and training gives the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks
from torch import Tensor

from strop.extensions.labs.fake_quant.apply_fake_quant import apply_fake_quant, iter_static_inputs
from strop.extensions.labs.fake_quant.calibration import set_input_scales
from strop.extensions.labs.fake_quant.fake_quant_linear import FORMATS, RoundedShard, TensorQuantizer
from strop.extensions.labs.fake_quant.modelopt_config import read_quant_config
from strop.learner.parallel.parallel_dims import ParallelDims
from strop.models.network import Network
from support.parity import EXACT, Case, Differences, compare_on_ranks, shorter
from support.sweep import sweep

pytestmark = pytest.mark.slow


def round_shards(rank: int, tensor: Tensor, names: list[str]) -> dict[tuple[str, int], Tensor]:
    group = torch.distributed.group.WORLD
    return {
        (name, dimension): RoundedShard(group, dimension).round(tensor.chunk(2, dimension)[rank], TensorQuantizer(FORMATS[name]))
        for name in names
        for dimension in (0, 1)
    }


@pytest.mark.exhaustive
def test_a_shard_is_rounded_to_the_bits_of_its_part_of_the_whole() -> None:
    """Also where its blocks of 16, 32 or 128 are cut."""
    tensor = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    names = [name for name in FORMATS if "e5m2" not in name]
    ranks = run_on_ranks(2, round_shards, tensor, names)
    for name in names:
        whole = TensorQuantizer(FORMATS[name]).round_detached(tensor)
        for dimension in (0, 1):
            assert torch.equal(torch.cat([each[name, dimension] for each in ranks], dimension), whole), (name, dimension)


def quantize(network: Network, source: str) -> None:
    """Static scales of inputs are 4."""
    apply_fake_quant(network.model, read_quant_config(source))
    set_input_scales(network.model, {name: 4.0 for name, _ in iter_static_inputs(network.model)})


def quantized(source: str, sizes: ParallelDims, **options: Any) -> Case:
    return Case(sizes=sizes, change=partial(quantize, source=source), **options)


CASES = {
    "fsdp 2, static inputs, checkpointing": quantized("FP8_DEFAULT_CFG", ParallelDims(shard=2), checkpointing=True),
    "tensor 2, scales of rows": quantized("FP8_PER_CHANNEL_PER_TOKEN_CFG", ParallelDims(tensor=2)),
    "experts 2": quantized("W4A16_NVFP4_CFG", ParallelDims(shard=2, expert=2), family="qwen3_moe"),
    "fsdp 2, weights": quantized("W4A16_NVFP4_CFG", ParallelDims(shard=2)),
    "fsdp 2, inputs, experts": quantized("W4A16_NVFP4_CFG", ParallelDims(shard=2), family="qwen3_moe"),
    "fsdp 2, lora": quantized("MXFP8_DEFAULT_CFG", ParallelDims(shard=2), lora=True, rate=1e-3),
    "fsdp 2, loaded once": quantized("MXFP8_DEFAULT_CFG", ParallelDims(shard=2), family="qwen2", rank_zero_loading=True),
    "tensor 2, weights": quantized("W4A16_NVFP4_CFG", ParallelDims(tensor=2)),
    "tensor 2, static inputs, sequence": quantized("FP8_DEFAULT_CFG", ParallelDims(tensor=2, sequence=True), family="qwen2"),
    "tensor 2, blocks that are cut": quantized("MXFP8_DEFAULT_CFG", ParallelDims(tensor=2)),
    "stages 2, weights": quantized("NVFP4_DEFAULT_CFG", ParallelDims(pipeline=2)),
    "context 2, inputs": quantized("MXFP8_DEFAULT_CFG", ParallelDims(context=2)),
}
KEPT = ("fsdp 2, static inputs, checkpointing", "tensor 2, scales of rows")


@cache
def on_two(kept: bool) -> Callable[[str], Differences]:
    """All cases that are kept for `make test`, or all others, in one start of the ranks."""
    return compare_on_ranks(2, {name: shorter(case) if kept else case for name, case in CASES.items() if (name in KEPT) == kept})


@pytest.mark.parametrize("name", sweep(CASES, *KEPT))
def test_training_on_many_ranks_is_training_in_one_process(name: str) -> None:
    found = on_two(name in KEPT)(name)
    for part in ("loss", "norm", "outputs", "weights", "metrics"):
        assert getattr(found, part) <= getattr(EXACT, part), (part, found)
