"""One gradient: the same training in one process and on many ranks gives the same numbers."""

from __future__ import annotations

import pytest
import torch
from tests.support.ranks import on_ranks

from strop.sampling import Sampling
from strop.training.torch.parallel.layout import ParallelSizes
from support.parity import FEW, MANY, Case, batch_of, compare, on_rank, train

CASES: dict[int, dict[str, Case]] = {
    2: {
        "fsdp": Case(sizes=ParallelSizes(shard=2)),
        "fsdp, checkpointing, few groups": Case(sizes=ParallelSizes(shard=2), shapes=FEW, checkpointing=True),
        "fsdp, tied": Case(sizes=ParallelSizes(shard=2), family="qwen2", algorithm="gspo"),
        "fsdp, experts": Case(sizes=ParallelSizes(shard=2), family="qwen3_moe"),
        "fsdp, padded rows": Case(sizes=ParallelSizes(shard=2), packed=False),
        "fsdp, sft": Case(sizes=ParallelSizes(shard=2), algorithm="sft"),
        "fsdp, dpo": Case(sizes=ParallelSizes(shard=2), algorithm="dpo"),
        "fsdp, lora": Case(sizes=ParallelSizes(shard=2), lora=True),
        "fsdp, values": Case(sizes=ParallelSizes(shard=2), value=True),
        "fsdp, float32": Case(sizes=ParallelSizes(shard=2), dtype=torch.float32),
        "fsdp, autocast": Case(sizes=ParallelSizes(shard=2), dtype=torch.float32, precision=torch.bfloat16),
        "fsdp, bfloat16 weights": Case(
            sizes=ParallelSizes(shard=2), dtype=torch.float32, weights_dtype=torch.bfloat16, precision=torch.bfloat16
        ),
        "fsdp, lora on bfloat16": Case(
            sizes=ParallelSizes(shard=2), dtype=torch.float32, weights_dtype=torch.bfloat16, precision=torch.bfloat16, lora=True
        ),
        "fsdp, head on the policy": Case(sizes=ParallelSizes(shard=2), head=True),
        "context, head on the policy": Case(sizes=ParallelSizes(context=2), head=True),
        "fsdp, loaded once, tied": Case(sizes=ParallelSizes(shard=2), family="qwen2", loaded_once=True),
        "fsdp, loaded once, lora": Case(sizes=ParallelSizes(shard=2), lora=True, loaded_once=True),
        "fsdp, loaded once, bfloat16": Case(
            sizes=ParallelSizes(shard=2), loaded_once=True, dtype=torch.float32, weights_dtype=torch.bfloat16, precision=torch.bfloat16
        ),
        "copies": Case(sizes=ParallelSizes(replicate=2)),
        "context": Case(sizes=ParallelSizes(context=2)),
        "context, window": Case(sizes=ParallelSizes(context=2), family="mistral"),
        "context, checkpointing, few groups": Case(sizes=ParallelSizes(context=2), shapes=FEW, checkpointing=True),
        "context, softcap": Case(sizes=ParallelSizes(context=2), family="gemma2", dtype=torch.float32),
        "context, values": Case(sizes=ParallelSizes(context=2), value=True),
        "context, filters": Case(sizes=ParallelSizes(context=2), sampling=Sampling(temperature=1.3, top_k=200, top_p=0.99)),
        "context, tied, lora": Case(sizes=ParallelSizes(context=2), family="qwen2", lora=True),
    },
    4: {
        "fsdp": Case(sizes=ParallelSizes(shard=4)),
        "fsdp, few groups": Case(sizes=ParallelSizes(shard=4), shapes=FEW),
        "fsdp, dpo with fewer pairs than ranks": Case(sizes=ParallelSizes(shard=4), shapes=MANY[:3], algorithm="dpo"),
        "hsdp": Case(sizes=ParallelSizes(replicate=2, shard=2), checkpointing=True),
        "fsdp, context": Case(sizes=ParallelSizes(shard=2, context=2), algorithm="gspo"),
        "fsdp, context, tied, checkpointing": Case(
            sizes=ParallelSizes(shard=2, context=2), family="qwen2", checkpointing=True
        ),
        "context, repeated keys": Case(sizes=ParallelSizes(context=4), family="qwen3"),
        "fsdp, values": Case(sizes=ParallelSizes(shard=4), value=True),
    },
}


@pytest.mark.parametrize("world", CASES)
def test_it(world: int) -> None:
    cases = {name: (case, batch_of(case)) for name, case in CASES[world].items()}
    ranks = on_ranks(world, on_rank, cases)
    for name, (case, batch) in cases.items():
        found = compare([rank[name] for rank in ranks], train(case, batch), len(batch.target))
        print(name, found, ranks[0][name].steps[0].metrics["tokens_per_rank_max_over_mean"].value)
