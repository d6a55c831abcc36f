"""What makes a host wait for a GPU, counted on the simulated one. Bounds are what is there: they may only go down."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Thread
from typing import Any

import pytest
import torch

from strop.gpus import KIND
from strop.models.network import Network
from strop.sampling import Sampling
from strop.weight_sync.fingerprints import fingerprint
from strop.weight_sync.transports.host_memory import MemorySender
from strop.weight_sync.transports.manifest import build_manifest
from support import simulated_device
from support.algorithms import grpo
from support.learners import make_torch_learner
from support.models import build
from support.rollouts import pack_for, simple_groups
from support.torch_engine import Request, make_engine, make_runner, run_requests

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(KIND == "cuda", reason="counted on the simulated GPU")]

ALGORITHM = grpo()
COPIES = ("pageable uploads", "pinned uploads", "downloads", "pinned downloads")


def assert_at_most(counts: Mapping[str, float], bounds: Mapping[str, float]) -> None:
    over = {name: counts[name] for name in bounds if counts[name] > bounds[name]}
    assert not over, f"{over} of {dict(counts)}"


@pytest.mark.parametrize(
    ("graphs", "bounds"),
    [(True, {}), (False, {})],
    ids=["graphs", "no graphs"],
)
def test_a_decoding_step(graphs: bool, bounds: dict[str, float]) -> None:
    """The difference between 14 and 10 tokens of four requests, when all graphs are there."""
    runner = make_runner(Network(build("llama").to(KIND)), slots=4, cuda_graphs=graphs)
    found = []
    for length in (4, 10, 14):  # the first one captures
        requests = [Request([5, 9, place + 4], Sampling(max_new_tokens=length), place) for place in range(4)]
        with simulated_device.counting() as counts:
            run_requests(make_engine(runner), requests)
        found.append(counts)
    assert_at_most({name: (found[2][name] - found[1][name]) / 4 for name in simulated_device.NAMES}, {"host reads": -1} | bounds)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_micro_batch(precision: torch.dtype) -> None:
    batch = pack_for(simple_groups((11, (9, 1, 14)), (2, (5,)), (5, (20, 3))), ALGORITHM)
    network = Network(build("llama").to(KIND), precision=precision, packed=True)
    learner = make_torch_learner(network, Sampling(), train_tokens=10**6)
    learner.forward_backward(batch, ALGORITHM.loss)  # optimizer state, caches
    learner.step()
    with simulated_device.counting() as pass_counts:
        learner.forward_backward(batch, ALGORITHM.loss)
    with simulated_device.counting() as step_counts:
        learner.step()
    assert_at_most(pass_counts, {"host reads": -1})
    assert_at_most(step_counts, {"host reads": -1})


def publish() -> list[tuple[str, torch.Tensor]]:
    return [(f"layer {number}", torch.randn(256, 512, device=KIND)) for number in range(8)]


def test_a_publish_through_host_memory() -> None:
    """Of 4 MiB in eight tensors, sent as bfloat16; both ends on the device, and the receiver takes fingerprints."""
    tensors = publish()
    manifest, sender = build_manifest(tensors, torch.bfloat16), MemorySender(1, bucket_size=1 << 20, timeout=60)
    found: dict[str, Any] = {}

    def receive() -> None:
        receiver = sender.address.connect(0, torch.device(KIND))
        found.update((name, fingerprint(tensor)) for name, tensor in receiver.receive(manifest))
        receiver.close()

    thread = Thread(target=receive)
    with simulated_device.counting() as counts:
        thread.start()
        sender.send(manifest, tensors)
        thread.join()
    sender.close()
    assert found == {name: fingerprint(tensor.to(torch.bfloat16)) for name, tensor in tensors}
    assert_at_most(counts, {"host reads": -1})
