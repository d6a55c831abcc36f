"""Pipeline stages on two GPUs, over NCCL, train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strop.learner.parallel.micro_batch import assemble_result
from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.types import Batch
from support.parity import Case, make_batch, train

pytestmark = pytest.mark.gpu

dist: Any = torch.distributed
CASES = [
    Case(sizes=ParallelDims(pipeline=2), family="qwen2", dtype=torch.float32, precision=torch.float32),
    Case(sizes=ParallelDims(pipeline=2, interleaved=True), layers=4, dtype=torch.float32, precision=torch.float32),
]


def train_on_gpu(rank: int, folder: str, batches: list[Batch]) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    results = [train(case, batch, DeviceMeshes(case.sizes, "cuda")) for case, batch in zip(CASES, batches, strict=True)]
    torch.save([(result.steps, result.step_metrics) for result in results], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
def test_stages_on_two_gpus_train_as_one_process(tmp_path: Path) -> None:
    batches = [make_batch(case) for case in CASES]
    torch.multiprocessing.spawn(train_on_gpu, (str(tmp_path), batches), nprocs=2)  # type: ignore[attr-defined]
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for number, (case, batch) in enumerate(zip(CASES, batches, strict=True)):
        alone = train(case, batch)
        for step, wanted in enumerate(alone.step_metrics):
            loss = assemble_result([rank[number][0][step] for rank in ranks], len(batch.target)).metrics["loss"].value
            expected = assemble_result([alone.steps[step]], len(batch.target)).metrics["loss"].value
            assert loss == pytest.approx(expected, rel=1e-3, abs=1e-4)
            assert ranks[0][number][1][step]["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3)
