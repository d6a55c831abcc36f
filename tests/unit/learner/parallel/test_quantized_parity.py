"""One gradient with fake quantisation: many ranks round each shard as one process rounds the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from tests.support.ranks import run_on_ranks
from torch import Tensor

from strop.learner.parallel.parallel_dims import ParallelDims
from strop.learner.parallel.sharded_fake_quant import RoundedShard
from strop.models.fake_quant.tensor_quantizer import FORMATS, TensorQuantizer
from support.parity import Case, Differences, compare, make_batch, train, train_on_rank

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

EXACT = Differences(loss=1e-10, norm=1e-10, outputs=1e-6, weights=1e-10, metrics=1e-9)
CASES: dict[str, Case] = {
    "fsdp 2, weights": Case(sizes=ParallelDims(shard=2), quant_cfg="W4A16_NVFP4_CFG"),
    "fsdp 2, inputs, experts": Case(sizes=ParallelDims(shard=2), family="qwen3_moe", quant_cfg="W4A16_NVFP4_CFG"),
    "fsdp 2, lora": Case(sizes=ParallelDims(shard=2), lora=True, rate=1e-3, quant_cfg="MXFP8_DEFAULT_CFG"),
    "fsdp 2, loaded once": Case(
        sizes=ParallelDims(shard=2), family="qwen2", rank_zero_loading=True, quant_cfg="MXFP8_DEFAULT_CFG"
    ),
    "tensor 2, weights": Case(sizes=ParallelDims(tensor=2), quant_cfg="W4A16_NVFP4_CFG"),
    "tensor 2, static inputs, sequence": Case(
        sizes=ParallelDims(tensor=2, sequence=True), family="qwen2", quant_cfg="FP8_DEFAULT_CFG"
    ),
    "tensor 2, blocks that are cut": Case(sizes=ParallelDims(tensor=2), quant_cfg="MXFP8_DEFAULT_CFG"),
    "stages 2, weights": Case(sizes=ParallelDims(pipeline=2), quant_cfg="NVFP4_DEFAULT_CFG"),
    "context 2, inputs": Case(sizes=ParallelDims(context=2), quant_cfg="MXFP8_DEFAULT_CFG"),
}


@cache
def on_ranks() -> Callable[[str], Differences]:
    cases = {name: (case, make_batch(case)) for name, case in CASES.items()}
    ranks = run_on_ranks(2, train_on_rank, cases)

    def differences(name: str) -> Differences:
        case, batch = cases[name]
        return compare([rank[name] for rank in ranks], train(case, batch), len(batch.target))

    return differences


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_one_process_does(name: str) -> None:
    """``test_parity`` has the cases of every day."""
    found = on_ranks()(name)
    for each in ("loss", "norm", "outputs", "weights", "metrics"):
        assert getattr(found, each) < getattr(EXACT, each), f"{name}: {each} {getattr(found, each):.2g}"


def round_shards(rank: int, tensor: Tensor, names: list[str]) -> dict[tuple[str, int], Tensor]:
    group = torch.distributed.group.WORLD
    return {
        (name, dimension): RoundedShard(group, dimension).round(tensor.chunk(2, dimension)[rank], TensorQuantizer(FORMATS[name]))
        for name in names
        for dimension in (0, 1)
    }


def test_a_shard_is_rounded_to_the_bits_of_its_part_of_the_whole() -> None:
    """Also where its blocks of 16, 32 or 128 are cut."""
    tensor = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    names = [name for name in FORMATS if "e5m2" not in name]
    ranks = run_on_ranks(2, round_shards, tensor, names)
    for name in names:
        whole = TensorQuantizer(FORMATS[name]).round_detached(tensor)
        for dimension in (0, 1):
            assert torch.equal(torch.cat([each[name, dimension] for each in ranks], dimension), whole), (name, dimension)
