"""Megatron Core on GPUs, over NCCL, gives the numbers of the torch learner on the CPU."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.megatron_adapters import PEFT
from support.megatron_parity import MegatronCase, case, train_cases_on_rank
from support.needs import needs_megatron
from support.parity import Differences, compare, make_batch, train

needs_megatron()
pytestmark = pytest.mark.gpu
dist: Any = torch.distributed

FLOAT32 = Differences(loss=1e-4, norm=1e-4, outputs=1e-4, weights=1e-4, metrics=1e-3)  # other kernels, other orders of addition
BFLOAT16 = Differences(loss=3e-2, norm=3e-2, outputs=3e-2, weights=1e-2, metrics=1.0)
SINGLE = case(dtype=torch.float32, steps=1)
MIXED = case(dtype=torch.bfloat16, steps=1, rate=1e-3)
CASES: dict[str, tuple[MegatronCase, Differences]] = {
    "one": (MegatronCase(case=SINGLE, world=1, device="cuda", distributed=True), FLOAT32),
    "one, bfloat16": (MegatronCase(case=MIXED, world=1, device="cuda", distributed=True, overlap=True), BFLOAT16),
    "tensor 2": (MegatronCase(case=SINGLE, world=2, device="cuda", sizes={"tp": 2, "sp": True}), FLOAT32),
    "stages 2": (MegatronCase(case=SINGLE, world=2, device="cuda", sizes={"pp": 2}), FLOAT32),
    "stages 2 x 2": (
        MegatronCase(case=replace(SINGLE, family="llama_deep"), world=2, device="cuda", sizes={"pp": 2, "vp": 2}),
        FLOAT32,
    ),
    "context 2": (MegatronCase(case=SINGLE, world=2, device="cuda", sizes={"cp": 2}), FLOAT32),
    "experts 2": (MegatronCase(case=replace(SINGLE, family="qwen3_moe"), world=2, device="cuda", sizes={"ep": 2}), FLOAT32),
    "data 2, overlapped": (MegatronCase(case=SINGLE, world=2, device="cuda", distributed=True, overlap=True), FLOAT32),
    "tensor 2, adapters": (
        MegatronCase(
            case=replace(SINGLE, lora=True, fused=True),
            world=2,
            device="cuda",
            sizes={"tp": 2, "sp": True},
            options={"peft": PEFT},
        ),
        FLOAT32,
    ),
    "fp8": (
        MegatronCase(case=MIXED, world=1, device="cuda", options={"fp8_cfg": {"enabled": True, "fp8_recipe": "tensorwise"}}),
        replace(BFLOAT16, loss=0.2, norm=0.5, outputs=0.2),
    ),
}


def _work(rank: int, world: int, folder: str, name: str, batch: Any) -> None:
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world)
    found = train_cases_on_rank(rank, {name: (CASES[name][0], batch)})[name]
    weights = {key: weight.cpu() for key, weight in found.weights.items()}
    adapters = {key: weight.cpu() for key, weight in found.adapters.items()}
    torch.save(replace(found, weights=weights, adapters=adapters), Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_megatron_core_on_gpus_gives_the_numbers_of_the_torch_learner(name: str) -> None:
    made, bound = CASES[name]
    if torch.cuda.device_count() < made.world:
        pytest.skip(f"needs {made.world} GPUs")
    if "fp8" in name:
        pytest.importorskip("transformer_engine")
    batch = make_batch(made.case)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_work, args=(made.world, folder, name, batch), nprocs=made.world)
        ranks = [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False) for rank in range(made.world)]
    found = compare(ranks, replace(train(made.case, batch), tied=[]), len(batch.target))
    for part in ("loss", "norm", "outputs", "weights", "metrics"):
        assert getattr(found, part) <= getattr(bound, part), (part, found)
