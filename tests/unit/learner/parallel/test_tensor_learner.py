"""A learner whose layers and experts are divided takes the steps of one in one process: loss, gradient norm, updated weights."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks
from tests.support.sharded import use_float64
from tests.unit.learner.parallel.test_tensor_parallel import LATENT

from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.sampling import Sampling
from support.models import CONFIGS
from support.parity import FEW, Case, TrainingResult, compare, make_batch, train
from support.sweep import sweep

pytestmark = pytest.mark.slow

EXACT = 1e-10  # float64


def qwen2_of_four_key_heads() -> Any:
    config = CONFIGS["qwen2"]()
    config.num_key_value_heads = 4
    return config


CONFIGS["qwen2_4"] = qwen2_of_four_key_heads
FLOAT32 = 2e-4

# At a rate of 1e-2 adapters amplify the order of additions: two cuts of one batch in one process then differ by 1.1e-10 in the third step.
CASES: dict[int, dict[str, Case]] = {
    2: {
        "tensor": Case(sizes=ParallelDims(tensor=2)),
        "tensor, tied, checkpointing": Case(sizes=ParallelDims(tensor=2), family="qwen2", checkpointing=True),
        "tensor, lora": Case(sizes=ParallelDims(tensor=2), lora=True, rate=1e-3),
        "tensor, filters": Case(sizes=ParallelDims(tensor=2), sampling=Sampling(temperature=1.3, top_k=200, top_p=0.99)),
        "sequence, tied, candidates": Case(sizes=ParallelDims(tensor=2, sequence=True), family="qwen2", algorithm="distillation"),
        "tensor, experts": Case(sizes=ParallelDims(tensor=2), family="qwen3_moe"),
        "sequence": Case(sizes=ParallelDims(tensor=2, sequence=True)),
        "sequence, tied, few groups": Case(
            sizes=ParallelDims(tensor=2, sequence=True), family="qwen2", shapes=FEW, checkpointing=True
        ),
        "sequence, experts, lora": Case(sizes=ParallelDims(tensor=2, sequence=True), family="qwen3_moe", lora=True, rate=1e-3),
        "experts over data": Case(sizes=ParallelDims(shard=2, expert=2), family="qwen3_moe"),
        "experts over data, few groups": Case(sizes=ParallelDims(shard=2, expert=2), family="qwen3_moe", shapes=FEW),
        "experts over data, latent attention": Case(
            sizes=ParallelDims(shard=2, expert=2), family="deepseek_v3", checkpointing=True
        ),
        "tensor, experts, replayed": Case(sizes=ParallelDims(tensor=2), family="qwen3_moe", replayed=True),
        "sequence, experts, replayed": Case(
            sizes=ParallelDims(tensor=2, sequence=True), family="qwen3_moe", replayed=True, checkpointing=True
        ),
        "experts over tokens, replayed": Case(sizes=ParallelDims(context=2, expert=2), family="mixtral", replayed=True),
        "experts over tokens": Case(sizes=ParallelDims(context=2, expert=2), family="qwen3_moe"),
        "tensor, values": Case(sizes=ParallelDims(tensor=2), value=True),
        "sequence, values": Case(sizes=ParallelDims(tensor=2, sequence=True), value=True),
        "tensor, float32": Case(sizes=ParallelDims(tensor=2), dtype=torch.float32),
    },
    4: {
        "fsdp, tensor": Case(sizes=ParallelDims(shard=2, tensor=2)),
        "fsdp, sequence, lora": Case(sizes=ParallelDims(shard=2, tensor=2, sequence=True), lora=True, rate=1e-3),
        "copies, sequence, tied": Case(sizes=ParallelDims(replicate=2, tensor=2, sequence=True), family="qwen2"),
        "context, sequence, experts, replayed": Case(
            sizes=ParallelDims(context=2, tensor=2, sequence=True), family="qwen3_moe", replayed=True
        ),
        "fsdp, tensor, experts": Case(sizes=ParallelDims(shard=2, tensor=2), family="qwen3_moe"),
        "fsdp, sequence, more experts": Case(sizes=ParallelDims(shard=2, tensor=2, expert=4, sequence=True), family="qwen3_moe"),
        "fsdp of experts": Case(sizes=ParallelDims(shard=4, expert=2), family="qwen3_moe", checkpointing=True),
        "copies, experts": Case(sizes=ParallelDims(replicate=2, shard=2, expert=2), family="deepseek_v3"),
        "context, sequence, a plan by name": Case(
            sizes=ParallelDims(context=2, tensor=2, sequence=True), family="deepseek_v3", tensor_plan=LATENT
        ),
        "context, tensor": Case(sizes=ParallelDims(context=2, tensor=2)),
        "tensor of four, tied": Case(sizes=ParallelDims(tensor=4), family="qwen2_4"),
        "context, sequence, experts, lora": Case(
            sizes=ParallelDims(context=2, tensor=2, sequence=True), family="qwen3_moe", lora=True, rate=1e-3
        ),
    },
}


def both(rank: int, cases: dict[str, Case]) -> dict[str, tuple[TrainingResult, TrainingResult | None, int]]:
    """What this rank trained, and on the first one what one process trains."""
    found = {}
    for name, case in cases.items():
        if case.dtype == torch.float64:
            use_float64(case.family)
        batch = make_batch(case)
        trained = train(case, batch, DeviceMeshes(case.sizes, "cpu"))
        found[name] = trained, train(case, batch) if rank == 0 else None, len(batch.target)
    return found


def differences(world: int) -> dict[str, Any]:
    ranks: list[Any] = run_on_ranks(world, both, CASES[world])
    return {name: compare([rank[name][0] for rank in ranks], ranks[0][name][1], ranks[0][name][2]) for name in CASES[world]}


@pytest.mark.parametrize("world", sweep([2, 4]))
def test_three_steps_of_a_divided_learner_are_those_of_one_process(world: int) -> None:
    found = differences(world)
    worst = {name: max(getattr(one, field.name) for field in fields(one)) for name, one in found.items()}
    bounds = {name: FLOAT32 if case.dtype == torch.float32 else EXACT for name, case in CASES[world].items()}
    assert {name: found[name] for name in worst if not worst[name] < bounds[name]} == {}


ROUNDED = {"dtype": torch.float32, "weights_dtype": torch.bfloat16, "precision": torch.bfloat16, "steps": 1}
ROUNDED_CASES = {
    "tensor": Case(sizes=ParallelDims(tensor=2), **ROUNDED),
    "sequence, experts": Case(sizes=ParallelDims(tensor=2, sequence=True), family="qwen3_moe", **ROUNDED),
    "experts over data": Case(sizes=ParallelDims(shard=2, expert=2), family="qwen3_moe", **ROUNDED),
    "experts over data, float32 routers": Case(
        sizes=ParallelDims(shard=2, expert=2),
        family="deepseek_v3",
        dtype=torch.float32,
        precision=torch.bfloat16,
        steps=1,
    ),
}
ROUNDED_KEPT = ("sequence, experts", "experts over data, float32 routers")


@pytest.mark.parametrize("names", sweep([tuple(ROUNDED_CASES), ROUNDED_KEPT]), ids=" + ".join)
def test_the_first_gradient_in_bfloat16_is_that_of_one_process_but_for_rounding(names: tuple[str, ...]) -> None:
    ranks: list[Any] = run_on_ranks(2, both, {name: ROUNDED_CASES[name] for name in names})
    for name in names:
        divided, alone, _ = ranks[0][name]
        assert divided.step_metrics[0]["grad_norm"] == pytest.approx(alone.step_metrics[0]["grad_norm"], rel=0.02), name
