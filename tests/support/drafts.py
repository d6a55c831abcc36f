"""Draft heads of tiny policies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strop.base_config import subsection
from strop.extensions.labs.draft.draft_config import DraftConfig
from strop.extensions.labs.draft.eagle_config import new_shape
from strop.extensions.labs.draft.eagle_head import EagleHead
from strop.learner.model_config import ModelConfig
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Group
from support.algorithms import grpo
from support.learners import make_torch_learner
from support.models import to_float64
from support.rollouts import pack_for, simple_groups


class DraftedModelConfig(ModelConfig):
    """A model with a head."""

    draft: DraftConfig = subsection(DraftConfig)


def make_learned_head(network: Network, *, steps: int = 30, groups: Sequence[Group] = ()) -> EagleHead:
    """Give a network a head that has learned to predict it on ``groups``, or on random tokens, where it is right now and then."""
    head = add_head(network)
    learner = make_torch_learner(network, Sampling(), optimizer_kwargs={"lr": 1e-2}, kind=DraftedModelConfig)
    for group in learner.optimizer.param_groups:
        group["lr"] = 0.0  # of the policy
    learner.scheduler = None
    for seed in range(steps):
        random = simple_groups((4, (16, 16)), (3, (16, 16)), seed=seed)
        learner.forward_backward(pack_for(groups or random, grpo()), grpo().loss)
        learner.step()
    return head


def add_head(network: Network, *, layers: int = 1, seed: int = 0, sharpness: float = 1.0) -> EagleHead:
    """Give a network a new head, in the network's dtype. ``sharpness`` multiplies its matrices, to be far from a start at 0.02."""
    head = EagleHead(new_shape(network.model.config, layers=layers))
    head.initialize(network.head.weight, seed)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(sharpness)
    double = next(network.model.parameters()).dtype == torch.float64
    network.draft = head = to_float64(head) if double else head
    return head
