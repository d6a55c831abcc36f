"""The seam to inference engines: tokens in, tokens out, with the log-probability of every sampled token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from strop.sampling import Sampling
from strop.weights.base import AdapterFiles, ChannelAddress, Manifest


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """What an engine sampled for one request."""

    tokens: Tensor  # [L] int64, the stop token included
    logprobs: Tensor  # [L] float32, under the distribution that sampled
    versions: Tensor  # [L] int32, the weight version that sampled each token
    text: str
    stopped: bool  # True: a stop token or stop string; False: the maximum number of tokens
    entropies: Tensor | None = None  # [L] float32
    kept: Tensor | None = (
        None  # [L, K] int32, the ids each token was drawn from, padded with -1; None unless ``sampling.records``
    )


class RequestTooLong(ValueError):
    """A request that can never fit the engine's configured memory; the message says what to raise."""


class GeneratorDied(RuntimeError):
    """The engine's process is gone, and with it what it was generating; the message says which engine."""


class Generator(Protocol):
    """An inference engine, in this process or another."""

    version: int  # the weight version it holds

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        """Sample one completion. Equal (prompt, sampling, seed, weights) give equal tokens, whoever shares the batch.

        Raises RequestTooLong where the prompt cannot fit. ``session`` names a conversation whose prefix may be cached.
        """
        ...

    async def close(self) -> None: ...


class SharedGenerator(Generator, Protocol):
    """An engine on the learner's own module: nothing is sent to it, and it does not run while the learner does."""

    async def drain(self) -> None:
        """Hold new requests and return when none is running."""
        ...

    def resume(self, version: int) -> None:
        """Take up requests again, with the weights of ``version``."""
        ...


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


class Engine(Generator, Protocol):
    """A generator that holds weights of its own and is sent new ones, see ``strop.weights``."""

    name: str
    receivers: int  # processes of it that take weights: one for each tensor-parallel rank

    async def start(self) -> None:
        """Start, or start anew after it died. It holds no weights then, and requests wait for the first ``unpause``."""
        ...

    async def connect(self, address: ChannelAddress, first: int) -> None:
        """Weights will come from ``address``; its processes are the receivers from number ``first``."""
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

    async def unpause(self, version: int) -> None:
        """Go on, with the weights of ``version``. Raises RuntimeError where those it holds are of another."""
        ...

    async def sleep(self) -> None:
        """Give up the device's memory, as far as the engine can. Only while paused."""
        ...

    async def wake(self) -> None:
        """Take it again; weights may have to be sent anew."""
        ...

    def counters(self) -> Mapping[str, float]:
        """What it has done since it was made, by name; differences of two readings make rates."""
        ...
