"""The same training on several ranks and in one process: odd batches over every way of dividing."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from numerics.sections import Numbers, Row, Section, default_type
from strop.learner.parallel.parallel_dims import ParallelDims
from strop.sampling import Sampling
from support.parity import FEW, MANY, Case, compare, make_batch, shorter, train, train_on_rank
from support.ranks import run_on_ranks

CASES: dict[str, Case] = {
    "fsdp 2": Case(sizes=ParallelDims(shard=2)),
    "fsdp 2, fewer groups than ranks fill, checkpointing": Case(sizes=ParallelDims(shard=2), shapes=FEW, checkpointing=True),
    "fsdp 2, tied, sequence ratios": Case(sizes=ParallelDims(shard=2), family="qwen2", algorithm="gspo"),
    "fsdp 2, branches": Case(sizes=ParallelDims(shard=2), branches=True),
    "fsdp 2, padded rows": Case(sizes=ParallelDims(shard=2), packed=False),
    "fsdp 2, sft": Case(sizes=ParallelDims(shard=2), algorithm="sft"),
    "fsdp 2, dpo": Case(sizes=ParallelDims(shard=2), algorithm="dpo"),
    "fsdp 2, lora": Case(sizes=ParallelDims(shard=2), lora=True, rate=1e-3),
    "fsdp 2, critic": Case(sizes=ParallelDims(shard=2), value=True),
    "fsdp 2, experts": Case(sizes=ParallelDims(shard=2), family="qwen3_moe"),
    "copies 2": Case(sizes=ParallelDims(replicate=2)),
    "tensor 2": Case(sizes=ParallelDims(tensor=2)),
    "tensor 2, tied": Case(sizes=ParallelDims(tensor=2), family="qwen2"),
    "context 2": Case(sizes=ParallelDims(context=2)),
    "context 2, window": Case(sizes=ParallelDims(context=2), family="mistral"),
    "context 2, filters": Case(sizes=ParallelDims(context=2), sampling=Sampling(temperature=1.3, top_k=200, top_p=0.99)),
    "stages 2": Case(sizes=ParallelDims(pipeline=2)),
    "stages 2, sft": Case(sizes=ParallelDims(pipeline=2), algorithm="sft"),
    "context 3, ring, branches, tied": Case(sizes=ParallelDims(context=3), family="qwen2", branches=True),
    "fsdp 4, few groups": Case(sizes=ParallelDims(shard=4), shapes=FEW),
    "fsdp 4, fewer pairs than ranks": Case(sizes=ParallelDims(shard=4), shapes=MANY[:3], algorithm="dpo"),
    "copies 2, fsdp 2": Case(sizes=ParallelDims(replicate=2, shard=2)),
    "fsdp 2, context 2": Case(sizes=ParallelDims(shard=2, context=2), algorithm="gspo"),
    "stages 2, tensor 2": Case(sizes=ParallelDims(pipeline=2, tensor=2)),
    "context 2, tensor 2, tied": Case(sizes=ParallelDims(context=2, tensor=2, sequence=True), family="qwen2"),
}
BF16: dict[str, Any] = {"dtype": torch.float32, "weights_dtype": torch.bfloat16, "precision": torch.bfloat16, "rate": 1e-3}
COARSE: dict[str, Case] = {
    "fsdp 2, float32": Case(sizes=ParallelDims(shard=2), dtype=torch.float32),
    "context 2, softcap, float32": Case(sizes=ParallelDims(context=2), family="gemma2", dtype=torch.float32),
    "fsdp 2, autocast to bfloat16": Case(sizes=ParallelDims(shard=2), dtype=torch.float32, precision=torch.bfloat16, rate=1e-3),
    "fsdp 2, bfloat16 weights": Case(sizes=ParallelDims(shard=2), **BF16),
    "fsdp 2, lora on bfloat16": Case(sizes=ParallelDims(shard=2), lora=True, steps=1, **BF16),
}


@cache
def trained(world: int, coarse: bool) -> dict[str, list[object]]:
    """All cases of a section with so many ranks, in one start of them."""
    table = COARSE if coarse else CASES
    cases = {name: (shorter(case), make_batch(case)) for name, case in table.items() if case.sizes.world_size == world}
    ranks = run_on_ranks(world, train_on_rank, cases)
    return {name: [cases[name], *(rank[name] for rank in ranks)] for name in cases}


def measure(name: str) -> Numbers:
    coarse = name in COARSE
    with default_type(torch.float32):
        (case, batch), *ranks = trained((COARSE if coarse else CASES)[name].sizes.world_size, coarse)[name]  # type: ignore[misc]
        found = compare(ranks, train(case, batch), len(batch.target))  # type: ignore[arg-type]
    return found.loss, found.norm, found.outputs, found.weights


def ranks() -> Section:
    return Section(
        "One gradient over ranks",
        "Two optimizer steps in float64 on several processes (gloo), compared with one process that reads all rollouts at once: "
        "groups of unequal prompts and completions, one without a signal, some of one token. Outputs are exchanged in float32. "
        "The remaining differences come from the order of additions.",
        ("loss", "gradient norm", "outputs", "weights"),
        (1e-10, 1e-10, 1e-6, 1e-10),
        tuple(Row(name, "one process", partial(measure, name)) for name in CASES),
    )


def coarse_ranks() -> Section:
    return Section(
        "One gradient over ranks, in float32 and bfloat16",
        "The same with the data types of a run. In bfloat16 two ways to cut the batch in one process differ as much.",
        ("loss", "gradient norm", "outputs", "weights"),
        (3e-2, 3e-2, 3e-2, 1e-2),
        tuple(Row(name, "one process", partial(measure, name)) for name in COARSE),
    )
