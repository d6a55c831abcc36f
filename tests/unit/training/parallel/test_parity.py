"""One gradient: the same training in one process and on many ranks gives the same numbers."""

from __future__ import annotations

import pytest
import torch
from tests.support.ranks import on_ranks

from strop.training.torch.parallel.layout import ParallelSizes
from support.parity import FEW, Case, batch_of, compare, on_rank, train

CASES: dict[int, dict[str, Case]] = {
    2: {
        "fsdp": Case(sizes=ParallelSizes(shard=2)),
        "fsdp, checkpointing, few groups": Case(sizes=ParallelSizes(shard=2), shapes=FEW, checkpointing=True),
        "context": Case(sizes=ParallelSizes(context=2)),
    },
}


@pytest.mark.parametrize("world", CASES)
def test_it(world: int) -> None:
    cases = {name: (case, batch_of(case)) for name, case in CASES[world].items()}
    ranks = on_ranks(world, on_rank, cases)
    for name, (case, batch) in cases.items():
        found = compare([rank[name] for rank in ranks], train(case, batch), len(batch.target))
        print(name, found, ranks[0][name].steps[0].metrics["tokens_per_rank_max_over_mean"].value)
