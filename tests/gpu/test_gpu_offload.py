"""On a GPU: an offloaded learner gives its memory to others and comes back the same; validation holds the weights once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from strop.gpus import KIND
from strop.learner.client import InlineCaller, MemoryClient
from strop.learner.torch.learner import TorchLearner
from strop.learner.torch.tensor_offload import ModelOffload
from strop.models.loading import cast_weights
from strop.models.network import Network
from strop.sampling import Sampling
from strop.weight_sync.in_process import TimedMemory
from support.algorithms import grpo
from support.learners import make_torch_learner
from support.models import build
from support.needs import needs_vllm
from support.rollouts import pack_for, simple_groups

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

GPU = torch.get_device_module(KIND)

ALGORITHM = grpo()
BATCH = pack_for(simple_groups((11, (9, 1, 14)), (2, (5,)), (5, (20, 3))), ALGORITHM)


def learner_of(*, masters: bool = False) -> TorchLearner:
    model = build("llama").to(KIND)
    network = Network(model, precision=torch.bfloat16 if masters else torch.float32, packed=True)
    if masters:
        cast_weights(model, torch.bfloat16)
    return make_torch_learner(network, Sampling(), average_decay=0.9, optimizer_kwargs={"lr": 1e-3})


def offload_of(learner: TorchLearner) -> ModelOffload:
    return ModelOffload([learner.state_offload, learner.weight_offload])


def train(learner: TorchLearner, *, offloaded: bool) -> list[torch.Tensor]:
    for _ in range(3):
        learner.forward_backward(BATCH, ALGORITHM.loss)
        learner.step()
        if offloaded:
            offload_of(learner).offload()
            offload_of(learner).onload()
    return [*(parameter.detach() for parameter in learner.model.parameters()), *learner.state.tensors()]


@pytest.mark.parametrize("masters", [False, True])
def test_training_with_a_learner_that_leaves_differs_no_more_than_two_equal_runs(masters: bool) -> None:
    """To the bit where these are equal: kernels of a GPU add in the order of arrival, unless policy.deterministic is set."""
    plain, again, moved = (train(learner_of(masters=masters), offloaded=offloaded) for offloaded in (False, False, True))
    assert all(tensor.device.type == KIND or not tensor.dim() for tensor in moved)
    assert largest_between(plain, moved) <= 10 * largest_between(plain, again)


def largest_between(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((left.double() - right.double()).abs().max()) for left, right in zip(one, other, strict=True))


def test_an_offloaded_learner_holds_no_memory_of_the_gpu_and_can_be_read_and_scored() -> None:
    learner = learner_of(masters=True)
    held = [tensor for tensor in train(learner, offloaded=False) if tensor.dim()]
    size, wanted = sum(tensor.nbytes for tensor in held), learner.score(BATCH)
    del held
    before = GPU.memory_allocated()
    offload_of(learner).offload()
    assert before - GPU.memory_allocated() >= 0.95 * size
    assert all(parameter.is_pinned() for parameter in learner.model.parameters())
    assert all(tensor.device.type != KIND for _, tensor in learner.weights())
    assert torch.equal(learner.score(BATCH).logprobs, wanted.logprobs)  # type: ignore[union-attr]
    assert before - GPU.memory_allocated() >= 0.95 * size, "and it left again"
    offload_of(learner).onload()
    assert learner.forward_backward(BATCH, ALGORITHM.loss).metrics


def test_swapping_in_the_average_needs_no_second_copy_of_the_weights() -> None:
    learner = learner_of()
    largest = max(parameter.nbytes for parameter in learner.model.parameters())
    assert learner.average is not None
    GPU.reset_peak_memory_stats()
    before = GPU.memory_allocated()
    with learner.average.swap_in(learner.trainable_parameters):
        assert GPU.memory_allocated() <= before
    assert GPU.max_memory_allocated() - before <= 2 * largest


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[Any]:
    needs_vllm()
    from strop.generation.vllm.vllm_engine import VllmEngine
    from support.vllm_engines import BackgroundLoop, make_launch, save_model_folder, serve, served_model

    room, model = BackgroundLoop(), served_model().to(KIND)
    folder = save_model_folder(model, tokenizer, tmp_path_factory.mktemp("served"))
    launch = make_launch(folder, on_cpu=False, sleep_level=2, gpu_memory_utilization=0.3)
    engine = VllmEngine("engine 0", launch, tokenizer, stop_ids=(tokenizer.eos_token_id,))
    served = serve(model, tokenizer, [engine], separate_devices=False, tolerance=0.02)
    learner = make_torch_learner(Network(model, packed=True), Sampling(), optimizer_kwargs={"lr": 1e-3})
    served.weights.learner_memory = TimedMemory(MemoryClient(InlineCaller(offload_of(learner))))
    yield room, served, learner
    room.run(served.close())
    room.close()


def test_a_learner_is_away_while_a_colocated_engine_samples_and_back_to_train(served: Any) -> None:
    room, model, learner = served
    for version in range(3):
        published = room.run(model.weights.publish(version), 600)
        assert published["timing/train/offload"].value > 0 and published["weights/tensors_not_read_back"].value == 0
        assert not any(parameter.device.type == KIND for parameter in learner.model.parameters())
        completion = room.run(model.pool.generate(tuple(range(40, 60)), sampling=Sampling(max_new_tokens=8), seed=version))
        assert completion.versions.unique().item() == version
        room.run(model.weights.yield_device())
        assert all(parameter.device.type == KIND for parameter in learner.model.parameters())
        learner.forward_backward(BATCH, ALGORITHM.loss)
        learner.step()
