"""Choosing a transport, and manifests with their buckets."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from strop.weight_sync.base import Manifest, TensorEntry
from strop.weight_sync.transports import broadcast, cuda_ipc, host_memory, shared_folder
from strop.weight_sync.transports.choose import EngineLocations, choose_senders, make_sender_factory
from strop.weight_sync.transports.cuda_ipc import CudaIpcReceiver, CudaIpcSender, _IpcHandle
from strop.weight_sync.transports.manifest import (
    ALIGNMENT,
    Bucket,
    build_manifest,
    manifest_digest,
    match_tensors,
    place_buckets,
    split_into_buckets,
    view_in_bucket,
)
from strop.weight_sync.transports.shared_buffer import SharedBufferAddress
from strop.weight_sync.weight_sync_config import WeightSyncConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BROADCAST = WeightSyncConfig(transport="broadcast")
FOLDER = WeightSyncConfig(transport="folder")


class Recorder:
    """A sender that notes what it is made with."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Recorder]]:
    places = {"MemorySender": host_memory, "CudaIpcSender": cuda_ipc, "BroadcastSender": broadcast, "FolderSender": shared_folder}
    kinds = {name: type(name, (Recorder,), {}) for name in places}
    for name, kind in kinds.items():
        monkeypatch.setattr(places[name], name, kind)
    return kinds


def sender(config: WeightSyncConfig, device: torch.device, **engines: Any) -> Any:
    return make_sender_factory(config, device, EngineLocations(**engines), Path("own"))(3)


@pytest.mark.parametrize(
    ("engines", "device", "expected"),
    [
        ({}, CPU, "MemorySender"),
        ({"colocated": False}, CPU, "MemorySender"),
        ({}, GPU, "CudaIpcSender"),
        ({"count": 2}, GPU, "MemorySender"),
        ({"count": 2, "colocated": False}, GPU, "BroadcastSender"),
        ({"same_machine": False}, CPU, "BroadcastSender"),
        ({"same_machine": False}, GPU, "BroadcastSender"),
        ({"same_machine": False, "colocated": False}, GPU, "BroadcastSender"),
    ],
)
def test_weights_travel_by_the_way_that_reaches_every_engine(
    engines: dict[str, Any], device: torch.device, expected: str, made: dict[str, type[Recorder]]
) -> None:
    assert type(sender(WeightSyncConfig(), device, **engines)) is made[expected]


def test_a_transport_that_is_named_is_taken(made: dict[str, type[Recorder]]) -> None:
    assert type(sender(FOLDER, GPU)) is made["FolderSender"]
    assert type(sender(BROADCAST, CPU)) is made["BroadcastSender"]


@pytest.mark.usefixtures("made")
def test_a_sender_is_made_as_the_configuration_says() -> None:
    sized = WeightSyncConfig(bucket_mb=2.0, timeout_seconds=5.0)
    assert sender(sized, CPU).options == {"timeout": 5.0, "bucket_size": 2 << 20}
    assert "bucket_size" not in sender(WeightSyncConfig(), CPU).options
    assert sender(BROADCAST, CPU).options["backend"] == "gloo"
    assert sender(BROADCAST, GPU, colocated=False, host="10.0.0.1").options["backend"] == "nccl"
    assert sender(BROADCAST, CPU, host="10.0.0.1").options["host"] == "10.0.0.1"
    with pytest.raises(ValueError, match="NCCL does not connect two processes on one GPU"):
        sender(BROADCAST, GPU)
    assert sender(WeightSyncConfig(transport="folder", folder="there"), CPU).arguments == (Path("there"), 3)
    assert sender(FOLDER, CPU).arguments == (Path("own"), 3)


HERE, THERE = "10.0.0.1", "10.0.0.2"


@pytest.mark.parametrize(
    ("config", "device", "engines", "hosts", "expected"),
    [
        ({}, CPU, {}, [HERE], (0,)),
        ({}, CPU, {}, [HERE] * 2, (0, 1)),
        ({}, CPU, {}, [HERE] * 8, (0, 2, 4, 6)),  # four, spread over all
        ({"senders": 8}, CPU, {}, [HERE] * 8, tuple(range(8))),
        ({"senders": 1}, CPU, {}, [HERE] * 8, (0,)),
        ({}, CPU, {"same_machine": False}, [HERE, HERE, THERE, THERE], (0, 1, 2, 3)),  # a broadcast leaves any node
        ({}, GPU, {"count": 2}, [HERE] * 8, (0, 2, 4, 6)),
        ({}, GPU, {}, [HERE] * 8, (0,)),  # the engine maps the memory of one rank
        ({}, GPU, {"colocated": False}, [HERE] * 8, (0,)),  # NCCL, which has not been run with several
        ({"senders": 2}, GPU, {"colocated": False}, [HERE] * 8, (0, 4)),
        ({"transport": "memory"}, CPU, {}, [HERE, HERE, THERE, THERE], (0, 1)),  # only these share the engines' memory
    ],
)
def test_weights_leave_from_as_many_ranks_as_reach_the_engines(
    config: dict[str, Any], device: torch.device, engines: dict[str, Any], hosts: list[str], expected: tuple[int, ...]
) -> None:
    assert choose_senders(WeightSyncConfig(**config), device, EngineLocations(**engines), hosts) == expected


@pytest.mark.parametrize(
    ("config", "hosts", "message"),
    [
        ({"senders": 2}, [HERE], "found 2, and there are 1 ranks that train"),  # a learner in one process
        ({"senders": 3}, [HERE] * 2, "found 3, and there are 2 ranks that train"),
        ({"senders": 3, "transport": "memory"}, [HERE] * 2 + [THERE] * 2, "there are 2 ranks that reach the engines over memory"),
    ],
)
def test_more_senders_than_ranks_are_refused(config: dict[str, Any], hosts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_senders(WeightSyncConfig(**config), CPU, EngineLocations(), hosts)


def test_several_senders_over_cuda_ipc_are_refused() -> None:
    with pytest.raises(ValueError, match="the engine can map the GPU memory of one rank"):
        sender(WeightSyncConfig(transport="cuda_ipc", senders=2), GPU)


def test_floating_tensors_are_cast_and_others_are_not() -> None:
    tensors = [("a", torch.zeros(2, 3)), ("b", torch.zeros(4, dtype=torch.int32)), ("c", torch.zeros((), dtype=torch.float16))]
    manifest = build_manifest(tensors, torch.bfloat16)
    assert [(entry.dtype, entry.shape) for entry in manifest.entries] == [
        (torch.bfloat16, (2, 3)),
        (torch.int32, (4,)),
        (torch.bfloat16, ()),
    ]
    assert manifest.nbytes == 12 + 16 + 2
    assert [entry.dtype for entry in build_manifest(tensors, None).entries] == [torch.float32, torch.int32, torch.float16]


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="two tensors are called a"):
        build_manifest([("a", torch.zeros(1)), ("a", torch.zeros(1))], None)


@given(st.lists(st.integers(0, 3000), max_size=30), st.integers(1, 4000))
@settings(deadline=None)
def test_buckets_hold_everything_once_in_order_without_overlap(counts: list[int], size: int) -> None:
    manifest = Manifest(tuple(TensorEntry(f"t{i}", torch.bfloat16, (count,)) for i, count in enumerate(counts)))
    found = split_into_buckets(manifest, size)
    assert tuple(placed.entry for bucket in found for placed in bucket.tensors) == manifest.entries
    for bucket in found:
        end = 0
        for placed in bucket.tensors:
            assert placed.offset % ALIGNMENT == 0
            assert placed.offset >= end
            end = placed.offset + placed.entry.nbytes
        assert end <= bucket.nbytes
        last = bucket.tensors[-1]
        assert len(bucket.tensors) == 1 or last.offset + last.entry.nbytes <= size


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        split_into_buckets(Manifest(()), 0)


@given(st.lists(st.integers(0, 50), max_size=60))
@settings(deadline=None)
def test_a_bucket_never_overlaps_with_one_that_may_still_be_read(sizes: list[int]) -> None:
    placed = place_buckets([Bucket((), size) for size in sizes], 100)
    assert [place.bucket.nbytes for place in placed] == sizes
    for count, place in enumerate(placed):
        assert place.end <= 100
        assert place.reads <= count, "a bucket waits only for those before it"
        assert all(other.end <= place.start or place.end <= other.start for other in placed[place.reads : count])


def test_a_bucket_is_filled_while_the_others_that_fit_are_read() -> None:
    assert [place.reads for place in place_buckets([Bucket((), 25)] * 8, 100)] == [0, 0, 0, 0, 1, 2, 3, 4]
    assert [place.start for place in place_buckets([Bucket((), 40)] * 4, 100)] == [0, 40, 0, 40]


def test_a_view_is_the_tensor_at_its_place() -> None:
    manifest = build_manifest([("a", torch.zeros(3)), ("b", torch.zeros(2, 2, dtype=torch.int64))], None)
    (bucket,) = split_into_buckets(manifest, 10_000)
    memory = torch.zeros(bucket.nbytes + 512, dtype=torch.uint8)
    view_in_bucket(memory, bucket.tensors[1], 512).copy_(torch.tensor([[1, 2], [3, 4]]))
    assert view_in_bucket(memory, bucket.tensors[1], 512).tolist() == [[1, 2], [3, 4]]
    assert memory[512 + ALIGNMENT :].view(torch.int64)[:4].tolist() == [1, 2, 3, 4]


def test_digests_tell_manifests_apart() -> None:
    manifests = [build_manifest([(name, torch.zeros(shape, dtype=dtype))], None) for name, shape, dtype in (
        ("a", (2, 3), torch.float32), ("b", (2, 3), torch.float32), ("a", (3, 2), torch.float32), ("a", (2, 3), torch.int32)
    )]  # fmt: skip
    assert len({manifest_digest(manifest) for manifest in manifests}) == 4
    assert manifest_digest(manifests[0]) == manifest_digest(Manifest(manifests[0].entries))


def test_tensors_that_are_not_those_of_the_manifest_are_refused() -> None:
    tensors = [("a", torch.zeros(2)), ("b", torch.zeros(3))]
    manifest = build_manifest(tensors, None)
    assert [entry.name for entry, _ in match_tensors(manifest, tensors)] == ["a", "b"]
    for wrong, message in (
        (tensors[::-1], r"a \(2,\) comes next, but b \(3,\) arrived"),
        (tensors[:1], "but nothing arrived"),
        ([*tensors, ("c", torch.zeros(1))], "c came after"),
        ([("a", torch.zeros(4)), tensors[1]], r"but a \(4,\) arrived"),
    ):
        with pytest.raises(ValueError, match=message):
            list(match_tensors(manifest, wrong))


def test_both_ends_are_gpus() -> None:
    with pytest.raises(ValueError, match="cpu is not a GPU"):
        CudaIpcSender(1, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="cpu cannot read another process's GPU memory"):
        SharedBufferAddress(CudaIpcReceiver, "nowhere", 1, 1, 1.0).connect(0, torch.device("cpu"))


def test_a_handle_is_opened_under_the_number_that_the_gpu_has_here() -> None:
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    handle = _IpcHandle("uuid", tuple(names))
    found = dict(zip(names, handle.rebuild_arguments(3), strict=True))
    assert found.pop("storage_device") == 3
    assert all(name == value for name, value in found.items())
