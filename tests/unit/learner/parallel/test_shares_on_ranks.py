"""Ranks that are sent their shares of a batch compute, bit for bit, what ranks compute that are handed the whole batch."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tests.support.ranks import run_on_ranks

from strop.learner.parallel.micro_batch import MicroBatchOutputs, tensor_fields
from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.types import Batch
from support.parity import MANY, Case, TrainingResult, make_batch, send_share, shorter, train
from support.sweep import sweep

CASES = {
    "fsdp 2": Case(sizes=ParallelDims(shard=2), layers=1),
    "fsdp 2, experts, replayed": Case(sizes=ParallelDims(shard=2), family="qwen3_moe", replayed=True),
    "fsdp 2, padded rows": Case(sizes=ParallelDims(shard=2), packed=False, layers=1),
    "fsdp 2, branches": Case(sizes=ParallelDims(shard=2), branches=True, layers=1),
    "context 2": Case(sizes=ParallelDims(context=2), layers=1),
    "stages 2": Case(sizes=ParallelDims(pipeline=2)),
    "fsdp 4, fewer pairs than ranks": Case(sizes=ParallelDims(shard=4), shapes=MANY[:3], algorithm="dpo", layers=1),
    "fsdp 2, tensor 2": Case(sizes=ParallelDims(shard=2, tensor=2), layers=1),
}


def train_both_ways(rank: int, cases: dict[str, tuple[Case, Batch]]) -> dict[str, str]:
    """Return, by case, what differs between training on whole batches and on shares; empty if nothing does."""
    found = {}
    for name, (case, batch) in cases.items():
        whole = train(case, batch, DeviceMeshes(case.sizes, "cpu"))
        shares = train(case, batch, DeviceMeshes(case.sizes, "cpu"), send_share)
        found[name] = find_difference(whole, shares)
    return found


def find_difference(whole: TrainingResult, shares: TrainingResult) -> str:
    if whole.step_metrics != shares.step_metrics:
        return f"step metrics {whole.step_metrics} {shares.step_metrics}"
    for name, weight in whole.weights.items():
        if not torch.equal(weight, shares.weights[name]):
            return f"weight {name}"
    passes: list[tuple[str, MicroBatchOutputs, MicroBatchOutputs]] = [
        *((f"step {number}", *pair) for number, pair in enumerate(zip(whole.steps, shares.steps, strict=True))),
        ("measured", whole.measured, shares.measured),
        ("scored", whole.scored, shares.scored),
    ]
    return next((name for name, first, second in passes if not same_outputs(first, second)), "")


def same_outputs(first: MicroBatchOutputs, second: MicroBatchOutputs) -> bool:
    if first.metrics != second.metrics or len(first.outputs) != len(second.outputs):
        return False
    return all(
        torch.equal(index, other_index) and all(torch.equal(tensor, getattr(other, name)) for name, tensor in tensor_fields(own))
        for (index, own), (other_index, other) in zip(first.outputs, second.outputs, strict=True)
    )


OTHERS = ("fsdp 2", "fsdp 2, padded rows", "fsdp 4, fewer pairs than ranks", "fsdp 2, tensor 2")  # or of four ranks
KEPT = tuple(name for name in CASES if name not in OTHERS)


@cache
def differences(world: int, kept: bool) -> list[dict[str, str]]:
    chosen = {name: case for name, case in CASES.items() if case.sizes.world_size == world and (name in KEPT) == kept}
    cases = {name: (shorter(case) if kept else case, make_batch(case)) for name, case in chosen.items()}
    return run_on_ranks(world, train_both_ways, cases)


@pytest.mark.parametrize("name", sweep(CASES, *KEPT))
def test_a_share_gives_the_bits_of_the_whole_batch(name: str) -> None:
    world = CASES[name].sizes.world_size
    assert [rank[name] for rank in differences(world, name in KEPT)] == [""] * world
