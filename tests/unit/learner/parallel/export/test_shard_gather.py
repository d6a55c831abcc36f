"""Tensors gathered on the rank that sends them have the bits of those that all ranks gather, and travel once."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks
from torch import Tensor

from strop.learner.parallel.export import sharded_export
from strop.learner.parallel.export.sharded_export import ShardedWeights
from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.learner.parallel.sharded import Sharded
from strop.weight_sync.fingerprints import fingerprint
from strop.weight_sync.weight_source import DealtWeight, gather_dealt, remove_tied
from support.parity import Case, build_trained_network

dist: Any = torch.distributed

CASES = {
    "fsdp 2": Case(sizes=ParallelDims(shard=2), layers=1),
    "fsdp 2, tied": Case(sizes=ParallelDims(shard=2), family="qwen2", layers=1),
    "fsdp 2, bfloat16": Case(sizes=ParallelDims(shard=2), dtype=torch.float32, weights_dtype=torch.bfloat16, layers=1),
    "fsdp 2, lora": Case(sizes=ParallelDims(shard=2), lora=True, layers=1),
    "stages 2, lora": Case(sizes=ParallelDims(pipeline=2), lora=True),
    "stages 2, tied": Case(sizes=ParallelDims(pipeline=2), family="qwen2"),
    "context 2": Case(sizes=ParallelDims(context=2), layers=1),
    "hsdp 2 x 2": Case(sizes=ParallelDims(replicate=2, shard=2), layers=1),
    "fsdp 4": Case(sizes=ParallelDims(shard=4), layers=1),  # some shards are empty
    "fsdp 2, tensor 2": Case(sizes=ParallelDims(shard=2, tensor=2), layers=1),
    "fsdp 2, tensor 2, experts 4": Case(sizes=ParallelDims(shard=2, tensor=2, expert=4), family="qwen3_moe", layers=1),
}


class CountedOperations:
    """Counts the bytes that this rank receives point to point."""

    def __init__(self) -> None:
        self.received, self._post = 0, sharded_export._post

    def __call__(self, operations: list[Any]) -> list[Any]:
        self.received += sum(each.tensor.nbytes for each in operations if each.op is dist.irecv)
        return self._post(operations)


def fingerprints_on_rank(rank: int, cases: dict[str, Case]) -> dict[str, Any]:
    found = {}
    for name, case in cases.items():
        _, placement = build_trained_network(case, DeviceMeshes(case.sizes, "cpu"))
        assert isinstance(placement, Sharded)
        found[name] = gather_both_ways(rank, placement)
    return found


def gather_both_ways(rank: int, placement: Sharded) -> dict[str, Any]:
    weights = ShardedWeights(placement)
    untied = remove_tied(weights.iter_weights()).weights
    by_all = {weight.name: fingerprint(weight.gather()) for weight in untied}
    counted = CountedOperations()
    sharded_export._post = counted  # type: ignore[assignment]
    dealt = [DealtWeight(weight, number % dist.get_world_size()) for number, weight in enumerate(untied)]
    own: dict[str, Any] = {}
    for ahead in (0, 1 << 14, 1 << 30):  # one after another, some at once, all at once
        again = remove_tied(weights.iter_weights()).weights
        dealt = [DealtWeight(weight, number % dist.get_world_size()) for number, weight in enumerate(again)]
        got: dict[str, Tensor] = {weight.name: tensor.clone() for weight, tensor in gather_dealt(dealt, rank, ahead)}
        assert list(got) == [each.weight.name for each in dealt if each.rank == rank], "in order"
        assert all(tensor.shape == by_name(again, name).spec.shape for name, tensor in got.items())
        marks = {name: fingerprint(tensor) for name, tensor in got.items()}
        assert not own or own == marks
        own = marks
    return {"all": by_all, "own": own, "received": counted.received // 3, "size": sum(weight.nbytes for weight in untied)}


def by_name(weights: Any, name: str) -> Any:
    return next(weight for weight in weights if weight.name == name)


@cache
def found_on(world: int) -> list[dict[str, Any]]:
    return run_on_ranks(
        world, fingerprints_on_rank, {name: case for name, case in CASES.items() if case.sizes.world_size == world}
    )


@pytest.mark.parametrize("name", CASES)
def test_each_tensor_has_the_bits_that_all_ranks_gather_and_is_on_one_rank(name: str) -> None:
    world = CASES[name].sizes.world_size
    ranks = [rank[name] for rank in found_on(world)]
    assert all(rank["all"] == ranks[0]["all"] for rank in ranks)
    merged: dict[str, int] = {}
    for rank in ranks:
        assert not merged.keys() & rank["own"].keys()
        merged |= rank["own"]
    assert merged == ranks[0]["all"]


@pytest.mark.parametrize("name", ["fsdp 2", "hsdp 2 x 2", "fsdp 4", "fsdp 2, tensor 2", "fsdp 2, tensor 2, experts 4"])
def test_a_byte_of_the_model_travels_to_one_rank_at_most(name: str) -> None:
    ranks = [rank[name] for rank in found_on(CASES[name].sizes.world_size)]
    assert 0 < sum(rank["received"] for rank in ranks) <= ranks[0]["size"]
