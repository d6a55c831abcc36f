"""Launches of a layer, and copies and memory of a publish, counted on the simulated GPU: bounds, which may only go down."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Thread

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

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(KIND != "sim", reason="counted on the simulated GPU (pytest --simulated-gpu)")]

ALGORITHM = grpo()
BATCH = pack_for(simple_groups((11, (9, 1, 14)), (2, (5,)), (5, (20, 3))), ALGORITHM)


def assert_at_most(counts: Mapping[str, float], bounds: Mapping[str, float]) -> None:
    over = {name: counts[name] for name in bounds if counts[name] > bounds[name]}
    assert not over, f"{over} of {dict(counts)}"


def count_training(network: Network) -> int:
    learner = make_torch_learner(network, Sampling(), train_tokens=10**6)
    with simulated_device.counting() as counts:
        learner.forward_backward(BATCH, ALGORITHM.loss)
    return counts["launches"]


def count_decoding(network: Network) -> int:
    """The difference between 14 and 10 tokens of four requests is that of four steps."""
    runner, found = make_runner(network, slots=4), []
    for length in (10, 14):
        requests = [Request([5, 9, place + 4], Sampling(max_new_tokens=length), place) for place in range(4)]
        with simulated_device.counting() as counts:
            run_requests(make_engine(runner), requests)
        found.append(counts["launches"])
    return (found[1] - found[0]) // 4


@pytest.mark.parametrize(("precision", "training", "decoding"), [(torch.float32, 276, 50), (torch.bfloat16, 166, 62)])
def test_launches_of_a_layer_that_is_not_compiled(precision: torch.dtype, training: int, decoding: int) -> None:
    """Both passes of a packed micro-batch, and a decoding step without a graph: what two more layers add."""
    for count, bound in ((count_training, training), (count_decoding, decoding)):
        two, four = (count(Network(build("llama", layers=layers).to(KIND), precision=precision)) for layers in (2, 4))
        assert_at_most({count.__name__: (four - two) / 2}, {count.__name__: bound})


def test_a_publish_through_host_memory() -> None:
    """Eight tensors of 512 KiB, sent as bfloat16 in buckets of 1 MiB; both ends are on the device, and the receiver takes fingerprints."""
    tensors = [(f"layer {number}", torch.randn(256, 512).to(KIND)) for number in range(8)]
    manifest, sender = build_manifest(tensors, torch.bfloat16), MemorySender(1, bucket_size=1 << 20, timeout=60)
    found: dict[str, int] = {}

    def receive() -> None:
        receiver = sender.address.connect(0, torch.device(KIND))
        found.update((name, fingerprint(tensor)) for name, tensor in receiver.receive(manifest))

    wanted = {name: fingerprint(tensor.to(torch.bfloat16)) for name, tensor in tensors}
    thread = Thread(target=receive)
    with simulated_device.counting() as counts:
        thread.start()
        sender.send(manifest, tensors)
        thread.join()
    sender.close()
    assert found == wanted
    assert_at_most(
        counts,
        {
            "host reads": 8,
            "pageable uploads": 8,
            "downloads": 8,
            "synchronizations": 4,
            "copied bytes": 4 << 20,
            "peak bytes": 2_400_000,
        },
    )
