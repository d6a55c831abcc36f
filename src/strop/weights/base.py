"""The seams between a learner that changes weights and generators that hold them.

Tensors travel under their canonical (Hugging Face) names, in the order of one ``Manifest`` that both sides know before the first byte.
A ``Sender`` lives with the learner, a ``Receiver`` with each generator; how the bytes get across is theirs alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from strop.metrics import Metrics
from strop.sampling import Sampling


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


class EngineDied(RuntimeError):
    """An engine's process is gone, and with it what it was generating; the message says which engine."""


class EngineLost(EngineDied):
    """An engine is gone, and so is the machine that it would have to be started on."""


@dataclass(frozen=True)
class Held:
    """The fingerprint of one tensor, or of one engine process's share of it, in the memory that the engine computes with."""

    fingerprint: int
    region: tuple[int, int, int, int]  # first row, rows, first column, columns, of the whole tensor: equal regions are replicas


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What an engine says of a publish after it."""

    version: int  # that it now reports; -1 where its weights are of no version
    received: Mapping[str, tuple[int, ...]]  # by tensor, the fingerprint of what arrived, one for each of its processes
    seconds: float  # from the first byte to weights that are ready to be used


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What an engine sampled for the canary."""

    tokens: Tensor  # [L] int64
    logprobs: Tensor  # [L] float32
    cached: int  # tokens of the prompt that were found in the prefix cache
    kept: Tensor | None = None  # [L, K] int32, the ids each token was drawn from, if that was asked for


class WeightHolder(Protocol):
    """An engine with weights of its own, as those who publish weights see it."""

    name: str
    receivers: int  # processes of it that take weights: one for each tensor-parallel rank

    async def start(self) -> None:
        """Start, or start anew after it died. It holds no weights then, and requests wait for the first ``unpause``."""
        ...

    async def close(self) -> None: ...

    async def connect(self, address: ChannelAddress, first: int) -> None:
        """Weights will come from ``address``; its processes are the receivers from number ``first``."""
        ...

    @property
    def alive(self) -> bool: ...

    async def ask(self, prompt: Sequence[int], *, sampling: Sampling, seed: int) -> Answer:
        """Sample ahead of the requests that wait, with weights that were loaded and not yet unpaused."""
        ...

    async def pause(self, *, keep_running: bool) -> None:
        """Hold new requests. With ``keep_running`` those that run stop where they are and go on later; else they finish first."""
        ...

    async def load(self, manifest: Manifest, version: int) -> Receipt:
        """Take one publish from the channel. Only while paused. Where it fails, the weights are of no version (-1) until one succeeds."""
        ...

    async def load_adapter(self, adapter: AdapterFiles, version: int) -> Receipt:
        """Take low-rank adapters alone, over the base weights it has."""
        ...

    async def held(self) -> Mapping[str, tuple[Held, ...]]:
        """By canonical name, what it computes with, read back out of its own layout. Tensors that cannot be read are left out."""
        ...

    async def forget_prefixes(self, *, running: bool) -> None:
        """Drop cached keys and values; with ``running`` also those of requests that were stopped half way, which read all again."""
        ...

    async def unpause(self, version: int) -> None:
        """Go on, with the weights of ``version``. Raises RuntimeError where those it holds are of another."""
        ...

    async def sleep(self) -> None:
        """Give up the device's memory, as far as the engine can. Only while paused; requests that run are finished before."""
        ...

    async def wake(self) -> None:
        """Take it again; weights may have to be sent anew."""
        ...
