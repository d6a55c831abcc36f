"""Megatron Core on GPUs, over NCCL and with Transformer Engine, gives the numbers of the torch learner on the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from support.needs import needs_megatron
from support.parity import Differences, compare, get_loss, make_batch, train

needs_megatron()
from strop.extensions.megatron.megatron_config import Fp8Config  # noqa: E402
from support.megatron_adapters import PEFT  # noqa: E402
from support.megatron_parity import MegatronCase, case, make_megatron_learner, train_cases_on_rank  # noqa: E402

pytestmark = pytest.mark.gpu
dist: Any = torch.distributed

FLOAT32 = Differences(loss=1e-4, norm=1e-4, outputs=1e-4, weights=1e-4, metrics=1e-3)  # other kernels, other orders of addition
BFLOAT16 = Differences(loss=3e-2, norm=3e-2, outputs=3e-2, weights=1e-2, metrics=1.0)
FP8 = replace(BFLOAT16, loss=0.2, norm=0.5, outputs=0.2)  # three bits of mantissa
SINGLE = case(dtype=torch.float32, steps=1)
MIXED = case(dtype=torch.bfloat16, steps=1, rate=1e-3)
WIDE, WIDE_EXPERTS = replace(MIXED, family="llama_wide"), replace(MIXED, family="qwen3_moe_wide")
EXPERTS = replace(SINGLE, family="qwen3_moe")
ENGINE = {"transformer_impl": "transformer_engine"}
TRANSFORMER_ENGINE, DEEP_EP, APEX = "transformer_engine", "deep_ep", "fused_weight_gradient_mlp_cuda"  # modules
LEAST_CAPABILITY = {"tensorwise": (8, 9), "delayed": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """A training run on GPUs, how far it may be from the torch learner, and what it needs."""

    made: MegatronCase
    bound: Differences
    needs: str | None = None  # a module
    capability: tuple[int, int] = (0, 0)


def on_gpus(trained: Any, bound: Differences, world: int = 1, needs: str | None = None, **options: Any) -> GpuCase:
    return GpuCase(made=MegatronCase(case=trained, world=world, device="cuda", **options), bound=bound, needs=needs)


def with_engine(trained: Any, bound: Differences, options: Mapping[str, Any], **rest: Any) -> GpuCase:
    return on_gpus(trained, bound, needs=TRANSFORMER_ENGINE, options=options, **rest)


def in_fp8(recipe: Any, trained: Any = WIDE, **rest: Any) -> GpuCase:
    fp8 = Fp8Config(enabled=True, fp8_recipe=recipe, fp8="hybrid" if recipe in ("tensorwise", "delayed") else "e4m3")
    return replace(with_engine(trained, FP8, {"fp8_cfg": fp8}, **rest), capability=LEAST_CAPABILITY[recipe])


CASES: dict[str, GpuCase] = {
    "one": on_gpus(SINGLE, FLOAT32, distributed=True),
    "one, bfloat16": on_gpus(MIXED, BFLOAT16, distributed=True, overlap=True),
    "tensor 2": on_gpus(SINGLE, FLOAT32, 2, sizes={"tp": 2, "sp": True}),
    "stages 2": on_gpus(SINGLE, FLOAT32, 2, sizes={"pp": 2}),
    "stages 2 x 2": on_gpus(replace(SINGLE, family="llama_deep"), FLOAT32, 2, sizes={"pp": 2, "vp": 2}),
    "context 2": on_gpus(SINGLE, FLOAT32, 2, sizes={"cp": 2}),
    "experts 2": on_gpus(EXPERTS, FLOAT32, 2, sizes={"ep": 2}, options={"moe_grouped_gemm": False}),
    "experts 2, tensor 2, stages 2": on_gpus(
        EXPERTS, FLOAT32, 4, sizes={"ep": 2, "tp": 2, "sp": True, "pp": 2}, options={"moe_grouped_gemm": False}
    ),
    "recorded experts": on_gpus(
        replace(EXPERTS, replayed=True),
        replace(FLOAT32, metrics=0.1),  # of near ties
        2,
        sizes={"ep": 2},
        options={"moe_grouped_gemm": False},
    ),
    "data 2, overlapped": on_gpus(SINGLE, FLOAT32, 2, distributed=True, overlap=True),
    "shared experts overlapped": on_gpus(
        replace(SINGLE, family="deepseek_v3"),
        FLOAT32,
        2,
        sizes={"ep": 2},
        options={"moe_shared_expert_overlap": True, "moe_grouped_gemm": False},
    ),
    "tensor 2, adapters": on_gpus(
        replace(SINGLE, lora=True, fused=True), FLOAT32, 2, sizes={"tp": 2, "sp": True}, options={"peft": PEFT}
    ),
    "layers of Transformer Engine": with_engine(MIXED, BFLOAT16, ENGINE),
    "layers of Transformer Engine, tensor 2": with_engine(MIXED, BFLOAT16, ENGINE, world=2, sizes={"tp": 2, "sp": True}),
    "grouped experts, permuted by a kernel": with_engine(
        WIDE_EXPERTS, BFLOAT16, {"moe_grouped_gemm": True, "moe_permute_fusion": True}, world=2, sizes={"ep": 2}
    ),
    "grouped experts, activations recomputed": with_engine(
        WIDE_EXPERTS,
        BFLOAT16,
        {"activation_checkpointing": True, "recompute_granularity": "selective", "recompute_modules": ("moe_act",)},
    ),
    "optimizer's kernel of Transformer Engine": with_engine(MIXED, BFLOAT16, {}, distributed=True),
    "gradients accumulated in kernels": on_gpus(MIXED, BFLOAT16, needs=APEX, options={"gradient_accumulation_fusion": True}),
    "DeepEP": on_gpus(
        WIDE_EXPERTS,
        BFLOAT16,
        2,
        needs=DEEP_EP,
        sizes={"ep": 2},
        options={"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True},
    ),
    **{f"fp8, {recipe}": in_fp8(recipe) for recipe in LEAST_CAPABILITY},
    "fp8, blockwise, tensor 2": in_fp8("blockwise", world=2, sizes={"tp": 2, "sp": True}),
    "fp8, blockwise, experts": in_fp8("blockwise", WIDE_EXPERTS),
}


def _start(rank: int, world: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world)


def _train(rank: int, world: int, folder: str, name: str, batch: Any) -> None:
    _start(rank, world, folder)
    found = train_cases_on_rank(rank, {name: (CASES[name].made, batch)})[name]
    weights = {key: weight.cpu() for key, weight in found.weights.items()}
    adapters = {key: weight.cpu() for key, weight in found.adapters.items()}
    torch.save(replace(found, weights=weights, adapters=adapters), Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def _refuse(rank: int, folder: str, name: str) -> None:
    _start(rank, 1, folder)
    with pytest.raises(RuntimeError, match=r"fp8_cfg\.fp8_recipe: found .* which needs .* and this GPU has compute capability"):
        make_megatron_learner(CASES[name].made)
    dist.destroy_process_group()


def _run_without_graphs(rank: int, folder: str, batch: Any) -> None:
    _start(rank, 1, folder)
    made = CASES["one, bfloat16"].made
    learner = make_megatron_learner(made)
    assert learner.transformer.cuda_graph_impl == "none"
    for _ in range(2):  # rows of other lengths: what a graph could not replay
        learner.forward_backward_local(batch, get_loss(made.case))
        learner.step()
        learner.score_local(batch)
    dist.destroy_process_group()


def _require(wanted: GpuCase) -> None:
    if torch.cuda.device_count() < wanted.made.world:
        pytest.skip(f"needs {wanted.made.world} GPUs")
    if wanted.needs is not None and find_spec(wanted.needs) is None:
        pytest.skip(f"needs {wanted.needs}")


@pytest.mark.parametrize("name", CASES)
def test_megatron_core_on_gpus_gives_the_numbers_of_the_torch_learner(name: str) -> None:
    wanted = CASES[name]
    _require(wanted)
    if torch.cuda.get_device_capability() < wanted.capability:
        pytest.skip(f"needs compute capability {wanted.capability}")
    made, bound, batch = wanted.made, wanted.bound, make_batch(wanted.made.case)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_train, args=(made.world, folder, name, batch), nprocs=made.world)
        ranks = [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False) for rank in range(made.world)]
    found = compare(ranks, replace(train(made.case, batch), tied=[]), len(batch.target))
    for part in ("loss", "norm", "outputs", "weights", "metrics"):
        assert getattr(found, part) <= getattr(bound, part), (part, found)


@pytest.mark.parametrize("recipe", LEAST_CAPABILITY)
def test_a_recipe_that_the_gpu_has_no_kernels_for_is_refused(recipe: str) -> None:
    wanted = CASES[f"fp8, {recipe}"]
    _require(wanted)
    if torch.cuda.get_device_capability() >= wanted.capability:
        pytest.skip("this GPU has them")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_refuse, args=(folder, f"fp8, {recipe}"), nprocs=1)


def test_rows_of_any_length_run_without_cuda_graphs() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run_without_graphs, args=(folder, make_batch(MIXED)), nprocs=1)
