"""vLLM on a GPU: publishes by every transport, captured graphs, sleeping beside a learner on the same device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from strop.sampling import Sampling
from strop.weight_sync.base import Sender
from strop.weight_sync.transports.broadcast import BroadcastSender
from strop.weight_sync.transports.cuda_ipc import CudaIpcSender
from strop.weight_sync.transports.host_memory import MemorySender
from support.needs import needs_vllm

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel

needs_vllm()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

DEVICE = torch.device("cuda", 0)
PROMPT = tuple(range(40, 60))
SENDERS = {
    "memory": MemorySender,
    "cuda_ipc": lambda receivers: CudaIpcSender(receivers, device=DEVICE),
    "broadcast": lambda receivers: BroadcastSender(receivers, backend="gloo", device=torch.device("cpu")),
}


@pytest.fixture(scope="module")
def room() -> Iterator[BackgroundLoop]:
    from support.vllm_engines import BackgroundLoop

    room = BackgroundLoop()
    yield room
    room.close()


@pytest.fixture(scope="module")
def served(room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[ServedModel]:
    from strop.generation.vllm.vllm_engine import VllmEngine
    from support.vllm_engines import make_launch, save_model_folder, serve, served_model

    model = served_model().to(DEVICE)
    folder: Path = save_model_folder(model, tokenizer, tmp_path_factory.mktemp("served"))
    settings = make_launch(folder, on_cpu=False, sleep_level=2, gpu_memory_utilization=0.3)
    engine = VllmEngine("engine 0", settings, tokenizer, stop_ids=(tokenizer.eos_token_id,))
    served = serve(model, tokenizer, [engine], separate_devices=False, tolerance=0.02)
    room.run(served.weights.publish(0), 600)
    yield served
    room.run(served.close())


@pytest.mark.parametrize("transport", list(SENDERS))
def test_weights_of_a_gpu_arrive_and_are_proven(room: BackgroundLoop, served: ServedModel, transport: str) -> None:
    from support.vllm_engines import perturb

    def make(receivers: int) -> Sender:
        return SENDERS[transport](receivers)

    room.run(served.weights.channel.close())
    served.export.make_sender = make
    perturb(served.model, 3)
    said = room.run(served.weights.publish(served.weights.version + 1))
    assert said["weights/tensors_not_read_back"].value == 0


def test_an_engine_sleeps_while_the_learner_works_and_wakes_with_new_weights(room: BackgroundLoop, served: ServedModel) -> None:
    from support.vllm_engines import perturb

    free = torch.cuda.mem_get_info(DEVICE)[0]
    room.run(served.weights.yield_device())
    assert torch.cuda.mem_get_info(DEVICE)[0] > free, "a sleeping engine gives memory back"
    perturb(served.model, 4)
    room.run(served.weights.publish(served.weights.version + 1))
    completion = room.run(served.pool.generate(PROMPT, sampling=Sampling(max_new_tokens=8), seed=1))
    assert completion.versions.unique().item() == served.weights.version


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_pipeline_stages_on_two_gpus_are_sent_weights_and_read_back(room: BackgroundLoop, tmp_path: Path, tokenizer: Any) -> None:
    from strop.generation.vllm.vllm_engine import VllmEngine
    from support.vllm_engines import compute_logprobs, make_launch, perturb, save_model_folder, serve, served_model

    model = served_model(layers=3, tied=False).to(DEVICE)
    launch = make_launch(
        save_model_folder(model, tokenizer, tmp_path), on_cpu=False, pipeline_parallel_size=2, gpu_memory_utilization=0.3
    )
    served = serve(
        model, tokenizer, [VllmEngine("engine 0", launch, tokenizer, stop_ids=(tokenizer.eos_token_id,))], tolerance=0.02
    )
    try:
        for version in range(2):
            perturb(model, version)
            said = room.run(served.weights.publish(version), 600)
            assert said["weights/tensors_read_back"].value == len(model.state_dict())
        sampling = Sampling(max_new_tokens=8)
        done = room.run(served.pool.generate(PROMPT, sampling=sampling, seed=1))
        assert float((done.logprobs - compute_logprobs(model, PROMPT, done.tokens, sampling)).abs().max()) < 1e-3
    finally:
        room.run(served.close())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, one for each of two nodes on this machine")
def test_an_engine_on_two_nodes_has_the_gpu_of_each(room: BackgroundLoop, tmp_path: Path, tokenizer: Any) -> None:
    from ray.cluster_utils import Cluster

    from support.spanning_engine import check, serve_on

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0, "include_dashboard": False})
    nodes.add_node(num_cpus=2, num_gpus=0, node_ip_address="127.0.0.2")

    async def live() -> None:
        served, cluster = await serve_on(nodes.address, tmp_path, tokenizer, gpus=("0", "1"))
        try:
            await check(served, 0, tolerance=1e-3)
        finally:
            await served.close()
            await cluster.close()

    try:
        room.run(live(), 800)
    finally:
        nodes.shutdown()
