"""The seams between a learner that changes weights and generators that hold them.

Tensors travel under their canonical (Hugging Face) names, in the order of one ``Manifest`` that both sides know before the first byte.
A ``Sender`` lives with the learner, a ``Receiver`` with each generator; how the bytes get across is theirs alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from strop.metrics import Metrics


class WeightSync(Protocol):
    """Publishes learner weights to generators, and takes the device back while the learner works."""

    async def lend_to_learner(self) -> None:
        """Generators finish what they run, hold what comes, and give up what they share with the learner."""
        ...

    async def publish(self, version: int) -> Metrics:
        """Every generator holds the learner's weights, under ``version``, when this returns."""
        ...


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as it is sent."""

    name: str  # canonical
    dtype: torch.dtype  # of what is sent, which may be narrower than what the learner holds
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def size(self) -> int:
        """In bytes."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """What is sent: every tensor, in order. Pickles small; both sides cut it into buckets alike."""

    entries: tuple[TensorEntry, ...]

    @cached_property
    def size(self) -> int:
        """In bytes."""
        return sum(entry.size for entry in self.entries)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)


@dataclass(frozen=True)
class AdapterFiles:
    """Low-rank adapters in PEFT's format, small enough to be sent as they are."""

    weights: bytes  # adapter_model.safetensors
    config: str  # adapter_config.json


NamedTensors = Iterable[tuple[str, Tensor]]


class TransportError(RuntimeError):
    """The other side went away, or did not answer within the time limit; the message says which and for how long."""


class Receiver(Protocol):
    """The generator's end."""

    def receive(self, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one publish, in order. Each is valid only until the next one is asked for: copy what is kept.

        Blocks. Raises TransportError where the sender does not deliver in time; then what was received is worth nothing.
        """
        ...

    def close(self) -> None: ...


class ChannelAddress(Protocol):
    """How a receiver finds its sender: a small frozen dataclass that pickles."""

    def connect(self, index: int, device: torch.device) -> Receiver:
        """Called in the generator's process by the ``index``-th of its ``Sender.receivers``; tensors arrive on ``device``."""
        ...


class Sender(Protocol):
    """The learner's end, for a fixed number of receivers."""

    receivers: int

    @property
    def address(self) -> ChannelAddress: ...

    def send(self, manifest: Manifest, tensors: NamedTensors) -> None:
        """Deliver ``tensors`` (the manifest's, in its order, cast to its types) to every receiver; returns when all have taken them.

        Blocks, so it is called in a thread while the receivers receive. Raises TransportError, and ValueError where the tensors are not
        those of the manifest.
        """
        ...

    def close(self) -> None: ...
