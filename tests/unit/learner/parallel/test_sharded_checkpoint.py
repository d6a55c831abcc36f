"""What many ranks save, any number of ranks reads, to the bit; and what one process saved, many read."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.learner.parallel.pipeline.pipelined import parallelize_stages
from strop.learner.parallel.shard_files import ForeignMetadata, ShardedReader, TensorShard, local_shard, write_shards
from strop.learner.parallel.sharded import parallelize_network
from strop.learner.parallel.sharded_checkpoint import take_snapshot
from strop.learner.torch.learner import TorchLearner
from strop.models.loading import cast_weights
from strop.models.network import Network
from strop.sampling import Sampling
from support.learners import make_scheduler_config, make_torch_learner
from support.lora import with_random_adapters
from support.models import build
from support.sweep import sweep

pytestmark = pytest.mark.slow

dist: Any = torch.distributed
ONE = ParallelDims()


@dataclass(frozen=True, kw_only=True)
class Form:
    """A model, and how it is trained."""

    family: str = "llama"
    layers: int | None = None
    weights_dtype: torch.dtype | None = None
    lora: bool = False
    optimizer: str = "torch.optim.AdamW"


FORMS = {
    "llama": Form(),
    "tied": Form(family="qwen2"),
    "experts": Form(family="qwen3_moe"),
    "bfloat16": Form(weights_dtype=torch.bfloat16),
    "lora": Form(family="qwen2", lora=True),
    "muon": Form(optimizer="strop.learner.muon.Muon"),
}


def learner_of(form: Form, sizes: ParallelDims, *, seed: int = 0) -> TorchLearner:
    """A new one, on all ranks of ``sizes``; on this device alone, where there is one rank. Other seeds have other weights."""
    torch.manual_seed(seed)
    model = build(form.family, layers=form.layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.01 * seed)
    if form.lora:
        model = with_random_adapters(model, dim=4)
    network = Network(model, precision=form.weights_dtype or torch.float32, chunk=5)
    placement = None
    if sizes.world_size > 1:
        parallelize = parallelize_stages if sizes.pipeline > 1 else parallelize_network
        placement = parallelize(network, DeviceMeshes(sizes, "cpu"), weights_dtype=form.weights_dtype)
    elif form.weights_dtype is not None:
        cast_weights(model, form.weights_dtype)
    return make_torch_learner(
        network,
        Sampling(),
        placement,
        optimizer=form.optimizer,
        optimizer_kwargs={"lr": 1e-2},
        no_decay=() if form.lora else ("norm",),
        schedule=make_scheduler_config(
            {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 9}}
        ),
        average_decay=0.5,
    )


def train(learner: TorchLearner, steps: int = 2) -> None:
    """Steps by gradients that do not depend on how the model is divided."""
    divided: Mapping[str, Tensor] = getattr(learner.parallelism, "sharded", {})
    for step in range(steps):
        noise = torch.Generator().manual_seed(step)
        for (name, parameter), (_, trained) in zip(learner.masters.named_parameters, learner.trainable_parameters, strict=True):
            piece = local_shard(divided.get(name, trained))
            whole = torch.randn(piece.shape, generator=noise)
            parameter.grad = whole[piece.index].clone().to(parameter.dtype)
        learner.optimizer.step()
        learner.masters.write_back()
        assert learner.average is not None and learner.scheduler is not None
        learner.average.update()
        learner.scheduler.step()
        learner.optimizer.zero_grad()


def whole_state(learner: TorchLearner) -> dict[str, Any]:
    """Everything a checkpoint restores, put together on every rank, as one process would have it."""
    taken = take_snapshot(learner.parallelism, learner.state)
    pieces = {**{f"weights.{name}": piece for name, piece in taken.weights.items()}, **taken.optimizer}
    pieces |= {f"ema.{name}": piece for name, piece in (taken.average or {}).items()}
    found: dict[str, Any] = {name: joined(piece) for name, piece in pieces.items()}
    undivided = taken.state["undivided"].items()
    found |= {f"undivided.{name}.{key}": value for name, values in undivided for key, value in values.items()}
    adapters = dict(learner.adapters())
    found |= {f"adapter.{name}": tensor.detach().clone() for name, tensor in adapters.items()}
    return found | {"groups": taken.state["groups"], "scheduler": taken.state["scheduler"], "steps": taken.state["average_steps"]}


def joined(piece: TensorShard) -> Tensor:
    parts: list[Any] = [piece]
    if dist.is_initialized():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (piece.tensor, piece.index))
    else:
        parts = [(piece.tensor, piece.index)]
    whole = torch.zeros(piece.shape, dtype=piece.tensor.dtype)
    for tensor, index in parts:
        whole[index] = tensor
    return whole


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Names of what is not the same to the bit."""
    odd = sorted(found.keys() ^ wanted.keys())
    for name in found.keys() & wanted.keys():
        left, right = found[name], wanted[name]
        same = torch.equal(left, right) and left.dtype == right.dtype if isinstance(left, Tensor) else left == right
        odd += [] if same else [name]
    return odd


# --- what runs on ranks ------------------------------------------------------------------------------------------------------------------


def train_and_save(rank: int, sizes: ParallelDims, forms: dict[str, Form], folder: Path) -> dict[str, Any]:
    states = {}
    for name, form in forms.items():
        learner = learner_of(form, sizes)
        train(learner)
        learner.save(folder / name)
        states[name] = whole_state(learner)
    return states if rank == 0 else {}


Read = tuple[str, str, ParallelDims]  # a folder of folders, the form in it, and the ranks that read it


def load_and_say(rank: int, reads: list[Read], folder: Path) -> list[dict[str, Any]]:
    """Into learners that had other weights and another state."""
    states = []
    for where, name, sizes in reads:
        learner = learner_of(FORMS[name], sizes, seed=1)
        train(learner, 1)
        learner.load(folder / where / name)
        states.append(whole_state(learner))
    return states if rank == 0 else []


STAGED = {
    "tied": Form(family="qwen2", layers=4),
    "bfloat16": Form(layers=4, weights_dtype=torch.bfloat16),
    "lora": Form(family="qwen2", layers=4, lora=True),
    "experts": Form(family="qwen3_moe", layers=4),
}
RELAY = {  # each loads what the one before it saved
    "stages and tensor": ParallelDims(pipeline=2, tensor=2),
    "four stages": ParallelDims(pipeline=4),
    "shards": ParallelDims(shard=4),
    "interleaved and shards": ParallelDims(pipeline=2, shard=2, interleaved=True),
}


def relay(rank: int, names: Sequence[str], layouts: dict[str, ParallelDims], folder: Path) -> None:
    """Load and save a checkpoint in one layout after another, each time over other weights and another state."""
    for name in names:
        before = folder / name / "one"
        for layout, sizes in layouts.items():
            learner = learner_of(STAGED[name], sizes, seed=1)
            learner.load(before)
            before = folder / name / layout
            learner.save(before)


def save_beside_training(rank: int, folder: Path) -> tuple[list[str], bool]:
    """What the files of a snapshot differ in from the learner at that moment, though it was trained on meanwhile."""
    learner = learner_of(FORMS["tied"], ParallelDims(shard=2))
    train(learner)
    wanted = whole_state(learner)
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(take_snapshot(learner.parallelism, learner.state).save, folder)
        train(learner, 3)
        moved = bool(differences(whole_state(learner), wanted))
        writing.result()
    learner.load(folder)
    return differences(whole_state(learner), wanted), moved


# --- tests -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", sweep([("experts", "lora"), tuple(FORMS)]), ids=", ".join)
def test_a_checkpoint_moves_between_numbers_of_ranks_and_layouts_without_changing_a_bit(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    forms = {name: FORMS[name] for name in names}
    for where in ("one", "two", "four"):
        (tmp_path / where).mkdir()
    alone = {}
    for name, form in forms.items():
        learner = learner_of(form, ONE)
        train(learner)
        learner.save(tmp_path / "one" / name)
        alone[name] = whole_state(learner)
    two = run_on_ranks(2, train_and_save, ParallelDims(shard=2), forms, tmp_path / "two")[0]
    for name in forms:
        assert two[name].keys() == alone[name].keys()
        assert (tmp_path / "two" / name / "optimizer" / ".metadata").exists()
        assert (tmp_path / "two" / name / "weights" / ".metadata").exists() != FORMS[name].lora
    saved = {"one": alone, "two": two}  # who trains on two ranks rounds another way in the last bit
    reads: list[Read] = [("one", name, ParallelDims(shard=4)) for name in forms]
    reads += [("two", "tied", ParallelDims(replicate=2, shard=2)), ("two", "experts", ParallelDims(shard=4, expert=2))]
    reads += [("two", name, ParallelDims(shard=2, tensor=2)) for name in ("llama", "bfloat16", "lora")]
    reads = [read for read in reads if read[1] in forms]
    for (where, name, sizes), state in zip(reads, run_on_ranks(4, load_and_say, reads, tmp_path)[0], strict=True):
        assert differences(state, saved[where][name]) == [], (where, name, sizes)
    tensor = run_on_ranks(4, train_and_save, ParallelDims(shard=2, tensor=2), forms, tmp_path / "four")[0]
    for name, form in forms.items():
        learner = learner_of(form, ONE, seed=1)
        for where, states in (("two", two), ("four", tensor)):
            learner.load(tmp_path / where / name)
            assert differences(whole_state(learner), states[name]) == [], (name, where)
        train(learner, 1)  # and it goes on


@pytest.mark.parametrize("names", sweep([("tied",), ("lora", "bfloat16", "experts"), ("tied", "lora")], ("tied",)), ids=", ".join)
def test_a_checkpoint_moves_through_pipeline_stages_without_changing_a_bit(names: tuple[str, ...], tmp_path: Path) -> None:
    # in `make test`: into stages, and out of them
    layouts = {layout: RELAY[layout] for layout in (("stages and tensor", "shards") if names == ("tied",) else RELAY)}
    wanted = {}
    for name in names:
        learner = learner_of(STAGED[name], ONE)
        train(learner)
        learner.save(tmp_path / name / "one")
        wanted[name] = whole_state(learner)
    run_on_ranks(4, relay, names, layouts, tmp_path)
    for name in names:
        for layout in layouts:
            learner = learner_of(STAGED[name], ONE, seed=1)
            learner.load(tmp_path / name / layout)
            assert differences(whole_state(learner), wanted[name]) == [], (name, layout)


@pytest.mark.exhaustive
def test_pieces_have_no_gaps_and_are_written_once(tmp_path: Path) -> None:
    run_on_ranks(4, train_and_save, ParallelDims(replicate=2, shard=2), {"tied": FORMS["tied"]}, tmp_path)
    model = build("qwen2")
    stored = ShardedReader(tmp_path / "tied" / "weights")
    assert sum(torch.Size(shape).numel() for shape in stored.shapes.values()) == sum(p.numel() for p in model.parameters())
    on_disk = sum(path.stat().st_size for path in stored.folder.glob("*.distcp"))
    assert on_disk == sum(place.length for place in FileSystemReader(stored.folder).read_metadata().storage_data.values())


def test_a_checkpoint_written_beside_training_is_of_the_moment_it_was_taken(tmp_path: Path) -> None:
    assert run_on_ranks(2, save_beside_training, tmp_path) == [([], True), ([], True)]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_one_process_goes_on_from_files_whose_names_are_not_the_models(tmp_path: Path, family: str) -> None:
    learner = learner_of(Form(family=family), ONE)
    train(learner)
    learner.save(tmp_path)
    again = learner_of(Form(family=family), ONE, seed=1)
    again.load(tmp_path)
    assert differences(whole_state(again), whole_state(learner)) == []
    for other in ("llama", "qwen2"):
        with pytest.raises(ValueError, match="do not fit the model"):
            learner_of(Form(family=other), ONE).load(tmp_path)


@pytest.mark.exhaustive
def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    run_on_ranks(2, train_and_save, ParallelDims(shard=2), {name: FORMS[name] for name in ("llama", "bfloat16")}, tmp_path)
    with pytest.raises(ValueError, match="do not fit the model: missing"):
        learner_of(FORMS["experts"], ONE).load(tmp_path / "llama")
    with pytest.raises(ValueError, match=r"float32 masters .* set policy.weights_dtype"):
        learner_of(FORMS["llama"], ONE).load(tmp_path / "bfloat16")
    with pytest.raises(ValueError, match=r"lora_cfg\.enabled=false"):
        learner_of(FORMS["lora"], ONE).load(tmp_path / "llama")
    for path in (tmp_path / "llama" / "optimizer").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match="save_optimizer=false"):
        learner_of(FORMS["llama"], ONE).load(tmp_path / "llama")


def test_one_step_after_loading_is_the_step_that_would_have_followed(tmp_path: Path) -> None:
    learner = learner_of(FORMS["llama"], ONE)
    train(learner)
    learner.save(tmp_path)
    learner.step()
    wanted = whole_state(learner)
    again = learner_of(FORMS["llama"], ONE, seed=1)
    again.load(tmp_path)
    again.step()
    assert differences(whole_state(again), wanted) == []


# --- folders that someone else wrote ------------------------------------------------------------------------------------------


class RunsCode:
    """Pickled, it is a call of ``os.mkdir``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_crafted_folder_runs_no_code_and_reads_no_file_outside(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    write_shards(tmp_path / "shards", {"a": TensorShard(tensor, (0, 0), (2, 3))}, None)
    metadata = tmp_path / "shards" / ".metadata"
    whole: Any = pickle.loads(metadata.read_bytes())
    assert ShardedReader(tmp_path / "shards").shapes == {"a": (2, 3)}

    whole.planner_data = RunsCode(tmp_path / "ran")
    metadata.write_bytes(pickle.dumps(whole))
    with pytest.raises(ForeignMetadata, match=r"posix\.mkdir.*could run code"):
        ShardedReader(tmp_path / "shards")
    assert not (tmp_path / "ran").exists()

    whole.planner_data = None
    for info in whole.storage_data.values():
        info.relative_path = "../elsewhere"
    metadata.write_bytes(pickle.dumps(whole))
    with pytest.raises(ForeignMetadata, match="outside of the folder"):
        ShardedReader(tmp_path / "shards")

    metadata.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ForeignMetadata, match="not the metadata of a checkpoint"):
        ShardedReader(tmp_path / "shards")
