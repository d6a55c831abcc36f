"""Several policies in one run: each is trained as if the others were not there."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from strop.algorithms.policy_gradient.grpo import GRPO
from strop.data.packing import pack
from strop.data.rollout_selector import map_policies
from strop.generation.torch.torch_past_selves import copy_network
from strop.learner.client import InlineCaller, LearnerClient
from strop.models.network import Network
from strop.sampling import Sampling
from strop.trainer.run import TrainingRun
from strop.trainer.update import update
from strop.types import TRAINED_POLICY, Batch, Group, Rollout
from support.learners import make_torch_learner
from support.lora import with_random_adapters
from support.models import build, largest_difference, to_float64
from support.rollouts import simple_groups


@dataclass(frozen=True, kw_only=True)
class Whitened(GRPO):
    """Its credit and its columns depend on all the tokens of an optimizer step."""

    entropy_target: float | None = 1e9
    entropy_bonus: float = 0.1

    def token_credit(self, batch: Batch) -> Batch:
        advantages = super().token_credit(batch).advantages
        return replace(batch, advantages=(advantages - advantages.mean()) / advantages.std())


def make_network() -> Network:
    torch.manual_seed(0)
    network = Network(with_random_adapters(to_float64(build("llama")), dim=4))
    network.model.requires_grad_(False)
    for name, parameter in network.model.named_parameters():
        parameter.requires_grad_("lora" in name)
    return network


def play(index: int, lengths: tuple[int, ...]) -> Group:
    """A group of episodes with three roles: the first and the last are the run's policy's, the second has its own."""
    roles = [simple_groups((5 + role, lengths), seed=10 * index + role)[0] for role in range(3)]
    number = {TRAINED_POLICY: torch.tensor([1], dtype=torch.int32)}
    named = [
        [replace(rollout, role=f"role {role}", columns=number if role == 1 else {}) for rollout in group.rollouts]
        for role, group in enumerate(roles)
    ]
    episodes = tuple(replace(first, others=tuple(others)) for first, *others in zip(*named, strict=True))
    return replace(roles[0], index=index, rollouts=episodes)


def train_once(groups: list[Group], networks: list[Network], steps: int, micro: int) -> list[dict[str, Tensor]]:
    """Train on the groups, as the loop does, and return the trained weights of each network."""
    algorithm: Any = Whitened()
    options = {"optimizer": "torch.optim.SGD", "optimizer_kwargs": {"lr": 1.0}, "max_grad_norm": None, "train_tokens": micro}
    learners = [make_torch_learner(network, Sampling(), **options) for network in networks]
    clients = {name: LearnerClient(InlineCaller(each)) for name, each in zip(("policy", "second"), learners, strict=False)}
    run = SimpleNamespace(
        algorithm=algorithm, learners=clients, step=0,
        timer=SimpleNamespace(span=lambda _: nullcontext()), tracker=SimpleNamespace(progress=lambda _: None),
        options=SimpleNamespace(steps_per_batch=steps, update_epochs=1),
    )  # fmt: skip
    parts = [part for group in groups for part in group.by_role()]
    batch = map_policies(pack(parts, algorithm.group_credit(parts)), algorithm.token_credit)
    asyncio.run(update(cast(TrainingRun, run), batch))
    return [
        {name: each.detach() for name, each in network.model.named_parameters() if each.requires_grad} for network in networks
    ]


@pytest.mark.parametrize(("steps", "micro"), [(1, 8192), (2, 20)])
def test_each_policy_is_trained_as_if_its_roles_were_alone(steps: int, micro: int) -> None:
    groups = [play(0, (3, 7, 4)), play(1, (6, 2, 5))]

    def keep(numbers: tuple[int, ...]) -> list[Group]:
        def strip(rollout: Rollout) -> tuple[Rollout, ...]:
            return tuple(replace(each, others=(), columns={}) for each in (rollout, *rollout.others))

        kept = [[strip(rollout) for rollout in group.rollouts] for group in groups]
        chosen = [[tuple(each[number] for number in numbers) for each in group] for group in kept]
        return [
            replace(group, rollouts=tuple(replace(first, others=tuple(others)) for first, *others in episodes))
            for group, episodes in zip(groups, chosen, strict=True)
        ]

    torch.set_default_dtype(torch.float64)
    try:
        network = make_network()
        policy, second = train_once(groups, [network, copy_network(network)], steps, micro)
        alone = train_once(keep((0, 2)), [make_network()], steps, 8192)[0]
        second_alone = train_once(keep((1,)), [make_network()], steps, 8192)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    before = {name: each for name, each in make_network().model.named_parameters() if name in policy}
    assert largest_difference(policy, before) > 1e-4 and largest_difference(policy, second) > 1e-4, "they learn different things"
    assert largest_difference(policy, alone) < 1e-11
    assert largest_difference(second, second_alone) < 1e-11
