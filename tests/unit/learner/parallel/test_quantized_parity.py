"""Fake quantisation: many ranks round each shard as one process rounds the whole tensor."""

from __future__ import annotations

import pytest
import torch
from tests.support.ranks import run_on_ranks
from torch import Tensor

from strop.learner.parallel.sharded_fake_quant import RoundedShard
from strop.models.fake_quant.tensor_quantizer import FORMATS, TensorQuantizer

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


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
