"""Offloaded models: what leaves the device, that it comes back bit for bit, and that training and checkpoints are as without it.

A CPU stands for the device: tensors move to other CPU memory, and what they occupied before is freed.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims, to_local
from strop.learner.torch import tensor_offload
from strop.learner.torch.learner import TorchLearner
from strop.learner.torch.tensor_offload import ModelOffload, TensorOffload
from strop.models.loading import cast_weights
from support.learners import make_torch_learner
from support.parity import Case, build_trained_network, get_loss, make_batch
from support.sweep import sweep

CPU = torch.device("cpu")
CASE = Case(sizes=ParallelDims(), dtype=torch.float32)
BATCH = make_batch(CASE)


def learner_of(case: Case = CASE, *, masters: bool = False, meshes: DeviceMeshes | None = None) -> TorchLearner:
    network, parallelism = build_trained_network(case, meshes)
    if masters:
        cast_weights(network.model, torch.bfloat16)
    return make_torch_learner(
        network,
        case.sampling,
        parallelism,
        optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.1},
        average_decay=None if case.lora else 0.9,
        train_tokens=40,
    )


def offload_of(learner: TorchLearner) -> ModelOffload:
    return ModelOffload([learner.state_offload, learner.weight_offload])


def train(learner: TorchLearner, steps: int, *, offloaded: bool) -> list[float]:
    norms = []
    for _ in range(steps):
        learner.forward_backward_local(BATCH, get_loss(CASE))
        norms.append(learner.step()["grad_norm"].value)
        if offloaded:
            offload_of(learner).offload()
            offload_of(learner).onload()
    return norms


def tensors_of(learner: TorchLearner) -> list[Tensor]:
    """The weights of this rank and the state of training, in a fixed order."""
    weights = [to_local(parameter).detach() for parameter in learner.model.parameters()]
    return [*weights, *learner.state.tensors()]


def memory_of(learner: TorchLearner) -> dict[StorageWeakRef, int]:
    """What holds the weights and the state of training, with its bytes."""
    storages = (tensor.untyped_storage() for tensor in tensors_of(learner) if tensor.dim() and tensor.numel())
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


def held_after_offload(learner: TorchLearner) -> tuple[int, int]:
    """Bytes of the device that were held before and are held after offloading."""
    before = memory_of(learner)
    offload_of(learner).offload()
    return sum(before.values()), sum(size for storage, size in before.items() if not storage.expired())


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def test_tensors_that_share_memory_still_do_and_their_old_memory_is_free() -> None:
    whole = torch.arange(12.0)
    parameter, part, other = nn.Parameter(whole.view(3, 4)), whole[4:8], torch.ones(5, dtype=torch.int64)
    places, wanted = [StorageWeakRef(each.untyped_storage()) for each in (whole, other)], [whole.clone(), other.clone()]
    offload = TensorOffload(lambda: (parameter, part, other), CPU)
    del whole
    used = []
    for _ in range(2):
        offload.offload()
        offload.offload()
        assert all(place.expired() for place in places)
        used.append({parameter.data_ptr(), other.data_ptr()})
        offload.onload()
        part += 1
        wanted[0][4:8] += 1
        assert torch.equal(parameter.flatten(), wanted[0]) and torch.equal(other, wanted[1])
        places = [StorageWeakRef(each.untyped_storage()) for each in (parameter, other)]
    assert used[0] == used[1], "CPU memory is used again"


def test_what_is_on_another_device_stays_there() -> None:
    parameter = torch.ones(3)
    place = parameter.data_ptr()
    offload = TensorOffload(lambda: (parameter,), torch.device("meta"))
    offload.offload()
    with offload.on_device():
        assert parameter.data_ptr() == place


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "masters": {"masters": True},
    "tied": {"case": Case(sizes=ParallelDims(), dtype=torch.float32, family="qwen2")},
    "lora": {"case": Case(sizes=ParallelDims(), dtype=torch.float32, lora=True)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_checkpoints_are_the_same_bits_as_without_and_nothing_stays_behind(kind: str, tmp_path: Path) -> None:
    plain, moved = learner_of(**KINDS[kind]), learner_of(**KINDS[kind])
    assert train(plain, 2, offloaded=False) == train(moved, 2, offloaded=True)
    assert equal(tensors_of(plain), tensors_of(moved))
    scored = plain.score(BATCH)
    before, after = held_after_offload(moved)
    assert before > 0 and after == 0
    assert torch.equal(moved.score(BATCH).logprobs, scored.logprobs), "a canary asks while the learner is offloaded"
    plain.save(tmp_path / "plain")
    moved.save(tmp_path / "moved")
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(plain.weights(), moved.weights(), strict=True))
    resumed = learner_of(**KINDS[kind])
    resumed.load(tmp_path / "moved")
    offload_of(moved).onload()
    assert train(moved, 1, offloaded=True) == train(plain, 1, offloaded=False) == train(resumed, 1, offloaded=False)
    assert equal(tensors_of(plain), tensors_of(moved)) and equal(tensors_of(plain), tensors_of(resumed))


def test_gradients_that_are_not_used_yet_leave_too() -> None:
    plain, moved = learner_of(masters=True), learner_of(masters=True)
    for learner in (plain, moved):
        learner.forward_backward(BATCH, get_loss(CASE))
    gradients = [StorageWeakRef(parameter.grad.untyped_storage()) for parameter in moved.parameters if parameter.grad is not None]
    offload_of(moved).offload()
    assert gradients and all(gradient.expired() for gradient in gradients)
    offload_of(moved).onload()
    assert plain.step() == moved.step() and equal(tensors_of(plain), tensors_of(moved))


SHARDED = {
    "fsdp, bfloat16": Case(
        sizes=ParallelDims(shard=2), dtype=torch.float32, weights_dtype=torch.bfloat16, precision=torch.bfloat16
    ),
    "tensor, lora": Case(sizes=ParallelDims(tensor=2), dtype=torch.float32, lora=True),
    "fsdp, tied, loaded once": Case(sizes=ParallelDims(shard=2), dtype=torch.float32, family="qwen2", rank_zero_loading=True),
}


def train_shards(rank: int, names: tuple[str, ...], folder: Path) -> dict[str, Any]:
    found = {}
    for name in names:
        case = SHARDED[name]
        plain, moved = (learner_of(case, meshes=DeviceMeshes(case.sizes, "cpu")) for _ in range(2))
        norms = train(plain, 2, offloaded=False), train(moved, 2, offloaded=True)
        same = equal(tensors_of(plain), tensors_of(moved))
        held = held_after_offload(moved)
        published = [tensor.clone() for _, tensor in moved.weights()]
        same = same and equal(published, [tensor.clone() for _, tensor in plain.weights()])
        moved.save(folder / name)
        offload_of(moved).onload()
        resumed = learner_of(case, meshes=DeviceMeshes(case.sizes, "cpu"))
        resumed.load(folder / name)
        ends = [train(learner, 1, offloaded=learner is moved) for learner in (plain, moved, resumed)]
        found[name] = norms[0] == norms[1], same, held, ends[0] == ends[1] == ends[2], equal(tensors_of(plain), tensors_of(moved))
    return found


KEPT = ("fsdp, bfloat16", "tensor, lora")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("names", sweep([KEPT, tuple(SHARDED)], KEPT), ids=" + ".join)
def test_shards_leave_and_come_back_on_every_rank(names: tuple[str, ...], tmp_path: Path) -> None:
    for rank in run_on_ranks(2, train_shards, names, tmp_path):
        assert tuple(rank) == names
        for name, (norms, same, (before, after), ends, continued) in rank.items():
            assert norms and same and ends and continued, name
            assert before > 0 and after == 0, (name, before, after)


def test_memory_for_an_optimizer_that_has_not_stepped_yet_is_pinned_while_the_rest_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[tuple[str, int]] = []  # by which thread, bytes

    def allocate(self: TensorOffload, size: int) -> Tensor:
        taken.append((threading.current_thread().name, size))
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(TensorOffload, "_allocate", allocate)
    monkeypatch.setattr(tensor_offload, "is_gpu", lambda device: True)
    gpu = SimpleNamespace(device=lambda device: nullcontext(), empty_cache=lambda: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)
    learner = learner_of()
    offload_of(learner).offload()
    assert learner.state_offload._pinning is not None
    learner.state_offload._pinning.join()
    ahead = sorted(size for thread, size in taken if thread == "strop-pinning")
    assert ahead == sorted(parameter.nbytes for parameter in learner.parameters for _ in range(2))
    offload_of(learner).onload()
    learner.forward_backward_local(BATCH, get_loss(CASE))
    learner.step()
    taken.clear()
    offload_of(learner).offload()
    assert not taken, "all that an optimizer made has its memory"
