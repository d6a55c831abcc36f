"""Training in pipeline stages is training in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks

from strop.algorithms.base import CANDIDATES
from strop.learner.parallel.export.sharded_export import iter_sharded_weights
from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.learner.parallel.pipeline.pipelined import parallelize_stages
from strop.learner.parallel.sharded import parallelize_head
from strop.learner.parallel.single_device import SingleDevice
from strop.models.network import Network
from strop.models.value_network import ValueHead
from strop.sampling import Sampling
from strop.types import Batch
from support.models import build
from support.parity import Case, Differences, build_network, compare, make_batch, shorter, train, train_on_rank
from support.sweep import sweep

pytestmark = pytest.mark.slow

# Largest relative differences; found at most 3e-14, with LoRA 1e-11.
EXACT = Differences(loss=1e-10, norm=1e-10, outputs=1e-12, weights=1e-10, metrics=1e-10)
BFLOAT16 = Differences(loss=3e-2, norm=3e-2, outputs=3e-2, weights=1e-2, metrics=1.0)
BF16: dict[str, Any] = {"dtype": torch.float32, "weights_dtype": torch.bfloat16, "precision": torch.bfloat16, "rate": 1e-3}

TWO = ParallelDims(pipeline=2)
INTERLEAVED = ParallelDims(pipeline=2, interleaved=True)
LAYOUTS = {
    "stages 2": TWO,
    "interleaved": INTERLEAVED,
    "one layer a stage": ParallelDims(pipeline=2, interleaved=True, layers_per_stage=1),
    "stages 2, shards 2": ParallelDims(pipeline=2, shard=2),
    "stages 2, copies 2": ParallelDims(pipeline=2, replicate=2),
    "stages 2, tensor 2": ParallelDims(pipeline=2, tensor=2),
    "stages 2, sequence 2": ParallelDims(pipeline=2, tensor=2, sequence=True),
    "stages 2, context 2": ParallelDims(pipeline=2, context=2),
    "interleaved, shards 2": ParallelDims(pipeline=2, shard=2, interleaved=True),
    "stages 4": ParallelDims(pipeline=4),
}
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma", "mistral", "mixtral")
PRODUCT = {
    f"{layout}, {family}, {algorithm}": Case(sizes=sizes, family=family, algorithm=algorithm, layers=4)
    for layout, sizes in LAYOUTS.items()
    for family in FAMILIES
    for algorithm in (
        ("grpo", "gspo", "sft", "dpo") if family in ("qwen2", "qwen3_moe") else ("dpo",) if family == "gemma" else ("grpo",)
    )
}
CASES = {
    "uneven layers, branches": Case(sizes=INTERLEAVED, layers=5, branches=True, family="mistral"),
    "lora, checkpointing, loaded once": Case(sizes=TWO, lora=True, checkpointing=True, rank_zero_loading=True, rate=1e-3),
    "few groups, filters": Case(
        sizes=TWO, shapes=((6, (5, 3, 4, 9)),), sampling=Sampling(temperature=1.3, top_k=200, top_p=0.99)
    ),
    "critic": Case(sizes=TWO, value=True),
    "frozen routers": Case(sizes=TWO, family="qwen3_moe", frozen_routers=True),
    "tied, loaded once": Case(
        sizes=ParallelDims(pipeline=2, context=2), family="qwen2", rank_zero_loading=True, checkpointing=True
    ),
    "experts, loaded once": Case(sizes=ParallelDims(pipeline=2, shard=2, expert=2), family="qwen3_moe", rank_zero_loading=True),
    "tied, uneven layers, more stages": Case(sizes=ParallelDims(pipeline=4), family="qwen2", layers=5),
    "lora, interleaved": Case(sizes=ParallelDims(pipeline=2, shard=2, interleaved=True), layers=4, lora=True),
    "tensor, lora": Case(sizes=ParallelDims(pipeline=2, tensor=2), lora=True, family="qwen2", rate=1e-3),
    **PRODUCT,
}
BOUNDS = {
    **{name: (case, EXACT) for name, case in CASES.items()},
    "bfloat16 weights": (Case(sizes=TWO, steps=1, **BF16), BFLOAT16),
}
KEPT = (  # layouts, schedules and kinds of models
    "uneven layers, branches",
    "lora, checkpointing, loaded once",
    "stages 2, qwen3_moe, sft",
    "bfloat16 weights",
    "interleaved, shards 2, qwen2, gspo",
)


@cache
def on_all(world: int, layout: str) -> Callable[[str], Differences]:
    """All cases of so many ranks that are kept for `make test`, or those of one layout, in one start of them."""
    chosen = KEPT if layout == "kept" else [name for name in BOUNDS if name not in KEPT and layout_of(name) == layout]
    names = [name for name in chosen if BOUNDS[name][0].sizes.world_size == world]
    shape = shorter if layout == "kept" else replace
    cases = {name: (shape(BOUNDS[name][0]), make_batch(BOUNDS[name][0])) for name in names}
    ranks = run_on_ranks(world, train_on_rank, cases)

    def differences(name: str) -> Differences:
        case, batch = cases[name]
        return compare([rank[name] for rank in ranks], train(case, batch), len(batch.target))

    return differences


def layout_of(name: str) -> str:
    return "kept" if name in KEPT else str(BOUNDS[name][0].sizes) + BOUNDS[name][0].family


@pytest.mark.extensions
@pytest.mark.parametrize("name", sweep(BOUNDS, *KEPT))
def test_training_in_pipeline_stages_is_training_in_one_process(name: str) -> None:
    case, bound = BOUNDS[name]
    found = on_all(case.sizes.world_size, layout_of(name))(name)
    for part in ("loss", "norm", "outputs", "weights", "metrics"):
        assert getattr(found, part) <= getattr(bound, part), (part, found)


# --- what is exported, scored and refused ------------------------------------------------------------------------------------


def top_tokens(network: Network, parallelism: Any, batch: Batch) -> Any:
    teacher = pytest.importorskip("strop.extensions.distillation.teacher")
    TeacherTopK, TeacherScorer = teacher.TeacherTopK, teacher.TeacherScorer
    return TeacherTopK(TeacherScorer(network, Sampling(), 30, parallelism), 5).columns_local(batch)


def answers(rank: int, batch: Batch) -> dict[str, Any]:
    meshes = DeviceMeshes(TWO, "cpu")
    network = build_network(Case(sizes=TWO, family="qwen2", lora=True))
    parallelism = parallelize_stages(network, meshes)
    exported = [(weight.name, weight.spec.shape, weight.gather()) for weight in iter_sharded_weights(parallelism)]
    full = parallelize_stages(build_network(Case(sizes=TWO)), meshes)
    return {
        "exported": exported,
        "tied": len({weight.storage_key for weight in iter_sharded_weights(parallelism)}),
        "adapters": dict(parallelism.adapters()),
        "columns": top_tokens(network, parallelism, batch),
        "held": sum(parameter.numel() for parameter in full.local_parameters.values()),
        "positions": said(lambda: parallelize_stages(Network(build("gpt2")), meshes)),
        "padded": said(lambda: parallelize_stages(Network(build("llama"), packed=False), meshes)),
        "layers": said(lambda: parallelize_stages(Network(build("llama")), DeviceMeshes(INTERLEAVED, "cpu"))),
        "head": said(lambda: parallelize_head(ValueHead(full.network), full)),  # type: ignore[arg-type]
    }


def said(run: Callable[[], Any]) -> str:
    try:
        run()
    except ValueError as error:
        return str(error)
    return ""


def test_stages_export_score_and_refuse_as_one_process_does() -> None:
    teacher = pytest.importorskip("strop.extensions.distillation.teacher")
    TeacherTopK, TeacherScorer = teacher.TeacherTopK, teacher.TeacherScorer
    case = Case(sizes=TWO, family="qwen2", lora=True)
    batch = make_batch(case)
    first, last = run_on_ranks(2, answers, batch)
    network = build_network(case)
    alone = SingleDevice(network)
    for rank in (first, last):
        assert [name for name, *_ in rank["exported"]] == [name for name, _ in alone.weights()]
        for (_, shape, tensor), (_, weight) in zip(rank["exported"], alone.weights(), strict=True):
            assert tensor.shape == shape and torch.equal(tensor, weight.to(tensor.dtype))
        assert rank["tied"] == len(rank["exported"]) - 1
        assert rank["adapters"].keys() == alone.adapters().keys()
        assert all(torch.equal(rank["adapters"][name], tensor) for name, tensor in alone.adapters().items())
        assert "GPT2" in rank["positions"] and "set dtensor_cfg.pipeline_parallel_size=1" in rank["positions"]
        assert "pipeline parallelism needs packed rows" in rank["padded"]
        assert "needs 4 stages (Interleaved1F1B), and LlamaForCausalLM has 2 layers" in rank["layers"]
        assert "set value.head_only=false" in rank["head"]
    whole = sum(parameter.numel() for parameter in build("llama").parameters())
    assert first["held"] + last["held"] == whole and max(first["held"], last["held"]) < 0.6 * whole
    assert first["columns"] == []
    columns = {name: torch.cat([part[name] for _, part in last["columns"]]) for name in last["columns"][0][1]}
    places = torch.cat([index for index, _ in last["columns"]])
    wanted = dict(TeacherTopK(TeacherScorer(network, Sampling(), 1000), 5).columns(batch, []))
    assert torch.equal(columns[CANDIDATES], wanted[CANDIDATES][places])
