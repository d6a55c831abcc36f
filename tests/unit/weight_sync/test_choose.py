"""By which way weights reach the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strop.weight_sync.transports import broadcast, cuda_ipc, host_memory, shared_folder
from strop.weight_sync.transports.choose import EngineLocations, choose_senders, make_sender_factory
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
