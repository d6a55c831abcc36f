"""On a GPU with ``policy.deterministic``: two equal passes are equal to the last bit, with siblings that share a prompt."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from strop.determinism import set_deterministic
from strop.models.network import Network
from strop.sampling import Sampling
from support.algorithms import grpo
from support.learners import make_torch_learner
from support.models import build, copy_gradients
from support.rollouts import pack_for, simple_groups

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def count_differences(dtype: torch.dtype, kernel: str) -> int:
    """In a process that has not used CUDA: cuBLAS reads its variable once."""
    set_deterministic(True)
    algorithm = grpo()
    batch = pack_for(simple_groups((200, (90, 130, 140, 31)), (20, (50,)), (150, (200, 30, 7))), algorithm)
    found = []
    for _ in range(2):
        model = build("llama").to("cuda")
        network = Network(model, precision=dtype, packed=True)
        network.attention_kernel = kernel
        learner = make_torch_learner(network, Sampling(top_p=0.9), optimizer_kwargs={"lr": 1e-3})
        for _ in range(3):
            learner.forward_backward(batch, algorithm.loss)
            gradients = copy_gradients(model)
            learner.step()
        found.append([*gradients.values(), *(parameter.detach() for parameter in model.parameters())])
    return sum(not torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kernel", ["auto", "plain", "flash"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_equal_passes_are_equal_to_the_last_bit(dtype: torch.dtype, kernel: str) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(count_differences, (dtype, kernel)) == 0
