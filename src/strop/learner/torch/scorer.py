"""Scorers: networks that read a batch without gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from strop.algorithms.base import Outputs
from strop.learner.parallel.micro_batch import MicroBatchOutputs, assemble_outputs, detach_to_cpu
from strop.learner.parallel.parallelism import Parallelism, SingleDevice
from strop.models.adapters import lora_layers
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch


class TrainableNetwork(Protocol):
    """A language model (``strop.models.network``) or a network with a scalar head (``strop.models.value_network``)."""

    model: Any
    device: torch.device
    packed: bool

    def outputs(self, batch: Batch, sampling: Sampling) -> Outputs: ...


class FrozenScorer:
    """A frozen network that only scores, such as a reference policy. ``offload`` keeps its weights on the CPU between uses."""

    def __init__(
        self,
        network: TrainableNetwork,
        sampling: Sampling,
        *,
        score_tokens: int,
        offload: bool = False,
        parallelism: Parallelism | None = None,
    ) -> None:
        """Raises ValueError for ``offload`` of a sharded network, whose parallelism decides where shards are kept."""
        if offload and parallelism is not None:
            raise ValueError("a sharded network is not moved between uses; shard it with cpu_offload instead")
        self.network = network
        self.sampling = sampling
        self.score_tokens = score_tokens
        self.parallelism = parallelism or SingleDevice(network)
        self.offload = offload and network.device.type != "cpu"
        network.model.requires_grad_(False)
        if self.offload:
            network.model.to("cpu")

    async def score(self, batch: Batch) -> Outputs:
        if self.offload:
            self.network.model.to(self.network.device)
        scores = assemble_outputs([self.score_local(batch)], len(batch.target))
        if self.offload:
            self.network.model.to("cpu")
        return scores

    def score_local(self, batch: Batch) -> MicroBatchOutputs:
        """Score this rank's micro-batches: with several ranks, a part of the result of ``score``."""
        return score_local(self.parallelism, batch, self.sampling, self.score_tokens)


@dataclass(frozen=True)
class NetworkScorer:
    """Scores with the current weights of a network that may be in training."""

    network: TrainableNetwork
    sampling: Sampling
    score_tokens: int
    parallelism: Parallelism | None = None

    async def score(self, batch: Batch) -> Outputs:
        return assemble_outputs([self.score_local(batch)], len(batch.target))

    def score_local(self, batch: Batch) -> MicroBatchOutputs:
        """Score this rank's micro-batches: with several ranks, a part of the result of ``score``."""
        return score_local(self.parallelism or SingleDevice(self.network), batch, self.sampling, self.score_tokens)


def score_batch(network: TrainableNetwork, batch: Batch, sampling: Sampling, token_budget: int) -> Outputs:
    """Score a batch with a network on a single device, micro-batch by micro-batch."""
    return assemble_outputs([score_local(SingleDevice(network), batch, sampling, token_budget)], len(batch.target))


@torch.no_grad()
def score_local(parallelism: Parallelism, batch: Batch, sampling: Sampling, token_budget: int) -> MicroBatchOutputs:
    """Score this rank's micro-batches of a batch."""
    micro_batches, _ = parallelism.split_batch(batch, token_budget)
    results = [
        (micro_batch, detach_to_cpu(parallelism.outputs(micro_batch.sub_batch.batch, sampling))) for micro_batch in micro_batches
    ]
    parallelism.finish_passes()
    reported = (
        (micro_batch.sub_batch.index, outputs)
        for micro_batch, outputs in results
        if parallelism.is_leader and not micro_batch.dummy
    )
    return MicroBatchOutputs(tuple(reported))


class AdapterOffScorer:
    """Scores with the frozen base of a network that has adapters: bitwise equal to a copy of the base."""

    def __init__(
        self, network: Network, sampling: Sampling, *, score_tokens: int, parallelism: Parallelism | None = None
    ) -> None:
        """Raises ValueError for a network without adapters: its base is trained."""
        if not lora_layers(network.model):
            raise ValueError(
                f"{type(network.model).__name__} has no adapters to disable, so it cannot be its own reference; use a "
                "FrozenScorer with a copy"
            )
        self.network = network
        self.sampling = sampling
        self.score_tokens = score_tokens
        self.parallelism = parallelism or SingleDevice(network)

    async def score(self, batch: Batch) -> Outputs:
        return assemble_outputs([self.score_local(batch)], len(batch.target))

    def score_local(self, batch: Batch) -> MicroBatchOutputs:
        """Score this rank's micro-batches: with several ranks, a part of the result of ``score``."""
        with self.network.disable_adapters():
            return score_local(self.parallelism, batch, self.sampling, self.score_tokens)
