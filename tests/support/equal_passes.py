"""Equal passes of a learner in a fresh process, and whether they are equal."""

from __future__ import annotations

from typing import Any

import torch

from strop.determinism import set_deterministic
from strop.models.network import Network
from strop.sampling import Sampling
from support.algorithms import grpo
from support.learners import make_torch_learner
from support.models import build, copy_gradients
from support.rollouts import pack_for, simple_groups


def count_differences(device: str, dtype: torch.dtype, kernel: Any) -> int:
    """Train twice from the same weights, with ``policy.deterministic``, on groups whose rollouts share a prompt. Return how many of the
    gradients and weights differ. In a process that has not used CUDA: cuBLAS reads its variable once."""
    set_deterministic(True)
    algorithm = grpo()
    batch = pack_for(simple_groups((200, (90, 130, 140, 31)), (20, (50,)), (150, (200, 30, 7))), algorithm)
    found = []
    for _ in range(2):
        model = build("llama").to(device)
        network = Network(model, precision=dtype, packed=True, attention_kernel=kernel)
        learner = make_torch_learner(network, Sampling(top_p=0.9), optimizer_kwargs={"lr": 1e-3})
        for _ in range(3):
            learner.forward_backward(batch, algorithm.loss)
            gradients = copy_gradients(model)
            learner.step()
        found.append([*gradients.values(), *(parameter.detach() for parameter in model.parameters())])
    return sum(not torch.equal(one, other) for one, other in zip(*found, strict=True))
