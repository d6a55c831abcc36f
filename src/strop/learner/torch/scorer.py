"""Scorers: networks that read a batch without gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from strop.algorithms.base import Outputs
from strop.data.shares import BatchShare, ShareRequest, without_read_columns
from strop.learner.parallel.micro_batch import LocalOutputs, MicroBatchOutputs, OutputsT, assemble_outputs
from strop.learner.parallel.parallelism import Parallelism
from strop.learner.parallel.single_device import SingleDevice
from strop.models.adapters import lora_layers
from strop.models.layers.compiled_layers import find_compiled_layers
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch

ScoringContext = Callable[[], AbstractContextManager[Any]]
"""Returns a context manager that is entered while a scorer reads a batch."""


class TrainableNetwork(Protocol):
    """A language model (``strop.models.network``) or a network with a scalar head (``strop.models.value_network``)."""

    model: Any
    device: torch.device
    packed: bool

    def outputs(self, batch: Batch, sampling: Sampling) -> Outputs: ...


@dataclass(frozen=True)
class NetworkScorer:
    """Scores with the current weights of a network: a frozen copy, or a network in training. It does its own routing
    of experts.

    ``context`` prepares the network while it reads: ``offload(network)``, ``without_adapters(network)`` for the reference of a LoRA run, or
    ``lambda: average.swap_in(parameters)`` for the moving average of the weights.
    """

    network: TrainableNetwork
    sampling: Sampling
    score_tokens: int  # tokens of one forward pass
    parallelism: Parallelism | None = None  # None: a single device
    context: ScoringContext = nullcontext

    def score(self, batch: Batch) -> Outputs:
        return assemble_outputs([self.score_local(batch)], len(batch.target))

    def share_requests(self) -> dict[str, ShareRequest]:
        """Return the share of a batch that this rank reads, if it is one of several."""
        parallelism = self.parallelism or SingleDevice(self.network)
        return {"score": parallelism.share_request(self.score_tokens)}

    def score_local(self, batch: Batch | BatchShare) -> MicroBatchOutputs:
        """Score this rank's micro-batches: with several ranks, a part of the result of ``score``."""
        return MicroBatchOutputs(self.read_local(batch, lambda part: self.network.outputs(part, self.sampling)))

    def read_local(self, batch: Batch | BatchShare, compute: Callable[[Batch], OutputsT]) -> LocalOutputs[OutputsT]:
        """Return the results of ``compute`` for each of this rank's micro-batches, with its positions [n] in the batch's N."""
        batch = without_read_columns(batch)  # a reference is another policy, with its own routing
        with self.context():
            return read_local(self.parallelism or SingleDevice(self.network), batch, self.score_tokens, compute)


def score_local(parallelism: Parallelism, batch: Batch | BatchShare, sampling: Sampling, token_budget: int) -> MicroBatchOutputs:
    """Score this rank's micro-batches of a batch."""
    outputs = read_local(parallelism, batch, token_budget, lambda part: parallelism.network.outputs(part, sampling))
    return MicroBatchOutputs(outputs)


@torch.no_grad()
def read_local(
    parallelism: Parallelism, batch: Batch | BatchShare, token_budget: int, compute: Callable[[Batch], OutputsT]
) -> LocalOutputs[OutputsT]:
    """Return the results of ``compute`` for each of this rank's micro-batches, with its positions [n] in the batch's N; nothing
    if another rank with the same micro-batches reports them.
    """
    micro_batches, _ = parallelism.split_batch(batch, token_budget)
    return parallelism.run_passes(micro_batches, compute)


def copy_frozen(network: Network) -> Network:
    """Return a frozen copy of a network with its current weights, in evaluation mode."""
    model = copy.deepcopy(network.model).eval().requires_grad_(False)
    if network.exact is not None:
        network.exact.restore_modules(model)  # a copy only scores
    twin = Network(
        model,
        precision=network.precision,
        chunk=network.chunk,
        packed=network.packed,
        attention_kernel=network.attention_kernel,
    )
    if network.vision is not None:
        twin.enable_vision(network.vision.processor)
    twin.compiled_layers = find_compiled_layers(model)  # it rounds like the network
    return twin


def without_adapters(network: Network) -> ScoringContext:
    """Return the context of a scorer that reads with the frozen base of a network: bitwise equal to a copy of the base.

    Raises ValueError for a network without adapters: its base is trained.
    """
    if not lora_layers(network.model):
        raise ValueError(
            f"{type(network.model).__name__} has no adapters to disable, so it cannot be its own reference; use a frozen copy "
            "(copy_frozen)"
        )
    return network.disable_adapters


def offload(network: TrainableNetwork) -> ScoringContext:
    """Move a network to the CPU and return the context that moves it to its device for reading. Does nothing for a network on the
    CPU.

    Raises ValueError for a sharded network, whose parallelism decides where shards are kept.
    """
    if any(isinstance(parameter, DTensor) for parameter in network.model.parameters()):
        raise ValueError("a sharded network cannot be moved between uses; shard it with cpu_offload instead")
    if network.device.type == "cpu":
        return nullcontext
    network.model.to("cpu")
    return lambda: on_device(network)


@contextmanager
def on_device(network: TrainableNetwork) -> Iterator[None]:
    """Move a model from the CPU to its device, and back on exit."""
    network.model.to(network.device)
    try:
        yield
    finally:
        network.model.to("cpu")
