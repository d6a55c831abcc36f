"""Interfaces of weight synchronization between a learner and generators.

Tensors are sent under their canonical (Hugging Face) names, in the order of a ``Manifest`` that both sides know before the transfer. The
learner has a ``Sender`` and each generator process a ``Receiver``; how the bytes are transferred is up to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from strop.columns import Columns
from strop.metrics import Metrics
from strop.sampling import Sampling


class WeightSync(Protocol):
    """Publishes the learner's weights to generators, and frees the device of generators while the learner trains."""

    async def yield_device(self) -> None:
        """Let generators finish their running requests, hold new ones, and release the device memory they share with the learner."""
        ...

    async def publish(self, version: int) -> Metrics:
        """Send the learner's weights to every generator as ``version``. Returns when all of them hold it."""
        ...


class LearnerMemory(Protocol):
    """The device memory of a learner that shares its devices with engines in turns."""

    async def offload(self) -> None:
        """Move the learner and its accompanying models to CPU memory, where its weights can still be read."""
        ...

    async def onload(self) -> None:
        """Move them back, to train."""
        ...


@dataclass(frozen=True)
class TensorEntry:
    """Name, data type and shape of one tensor as it is sent."""

    name: str  # canonical
    dtype: torch.dtype  # as sent, may be narrower than the learner's
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """All tensors of a publish, in order. Cheap to pickle; both sides split it into the same buckets."""

    entries: tuple[TensorEntry, ...]

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)


@dataclass(frozen=True)
class AdapterFiles:
    """LoRA adapters in PEFT's format, small enough to be sent in one message."""

    weights: bytes  # adapter_model.safetensors
    config: str  # adapter_config.json

    def tensors(self) -> dict[str, Tensor]:
        """Return the matrices by PEFT's names, on the CPU."""
        from safetensors.torch import load

        found: dict[str, Tensor] = load(self.weights)
        return found


NamedTensors = Iterable[tuple[str, Tensor]]


class TransportError(RuntimeError):
    """The other side exited or did not answer within the time limit; the message names it and the limit."""


class Receiver(Protocol):
    """The generator's end of a transport."""

    def receive(self, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of one publish, in order; from several senders, in the order of each.

        Each is valid only until the next one: clone those that are kept.

        Blocks. Raises TransportError if the sender does not deliver in time; the tensors received so far must then be discarded.
        """
        ...

    def close(self) -> None: ...


class ChannelAddress(Protocol):
    """The address of a sender: a small, picklable frozen dataclass."""

    def connect(self, index: int, device: torch.device) -> Receiver:
        """Connect as the ``index``-th of ``Sender.receivers``, in the generator's process. Tensors arrive on ``device``."""
        ...


class Sender(Protocol):
    """The learner's end of a transport, for a fixed number of receivers."""

    receivers: int

    @property
    def address(self) -> ChannelAddress: ...

    def send(self, manifest: Manifest, tensors: NamedTensors) -> None:
        """Send ``tensors`` to every receiver, cast to the manifest's data types. Returns when all receivers have read them.

        Blocks: call it in a thread while the receivers receive. Raises TransportError, and ValueError if the tensors do not match the
        manifest or its order.
        """
        ...

    def close(self) -> None: ...


class EngineDied(RuntimeError):
    """An engine's process exited and its running requests are lost; the message names the engine."""


class EngineLost(EngineDied):
    """An engine died and cannot be restarted, because its machine is gone too."""


@dataclass(frozen=True)
class TensorFingerprint:
    """The fingerprint of one tensor, or of one process's shard of it, in the memory that an engine computes with."""

    value: int
    region: tuple[int, int, int, int]  # first row, rows, first column, columns in the full tensor; equal regions are replicas


@dataclass(frozen=True, kw_only=True)
class LoadReceipt:
    """An engine's report after loading a publish."""

    version: int  # version now reported by the engine; -1 if its weights are undefined
    fingerprints: Mapping[str, tuple[int, ...]]  # tensor name -> fingerprints of the tensor as it arrived, one per engine process
    seconds: float  # from the first byte to weights that are ready for use


@dataclass(frozen=True, kw_only=True, eq=False)
class CanarySample:
    """A completion that an engine sampled for a canary prompt."""

    tokens: Tensor  # [L] int64
    logprobs: Tensor  # [L] float32
    cached: int  # number of prompt tokens found in the prefix cache
    columns: Columns = field(default_factory=dict)  # as in a completion


class UpdatableEngine(Protocol):
    """An engine with its own copy of the weights, as the weight publisher sees it."""

    name: str
    receivers: int  # processes that receive weights: one per tensor-parallel and pipeline-parallel rank

    async def start(self) -> None:
        """Start, or restart after the engine died. It has no weights yet, so requests wait for the first ``resume``."""
        ...

    async def close(self) -> None: ...

    async def connect(self, address: ChannelAddress, first: int) -> None:
        """Connect all processes of the engine to ``address``, as the receivers numbered from ``first``."""
        ...

    @property
    def alive(self) -> bool: ...

    async def sample_canary(self, prompt: Sequence[int], *, sampling: Sampling, seed: int) -> CanarySample:
        """Sample before all waiting requests, with weights that are loaded but not yet resumed."""
        ...

    async def pause(self, *, keep_running: bool) -> None:
        """Hold new requests. With ``keep_running`` running requests are suspended and continue later; else wait until they finish."""
        ...

    async def load(self, manifest: Manifest, version: int) -> LoadReceipt:
        """Receive and load one publish. Only while paused. After a failure the weights are undefined (version -1) until a load succeeds."""
        ...

    async def load_adapter(self, adapter: AdapterFiles, version: int) -> LoadReceipt:
        """Load LoRA adapters over the engine's base weights."""
        ...

    async def read_back_fingerprints(self) -> Mapping[str, tuple[TensorFingerprint, ...]]:
        """Return fingerprints of the weights that the engine computes with, read back from its own layout, by canonical name.

        Tensors that cannot be read back are left out.
        """
        ...

    async def reset_prefix_cache(self, *, running: bool) -> None:
        """Drop cached keys and values. With ``running`` also those of suspended requests, which are then recomputed."""
        ...

    async def resume(self, version: int) -> None:
        """Serve requests with the weights of ``version``. Raises RuntimeError if the engine holds another version."""
        ...

    async def sleep(self) -> None:
        """Release device memory, as far as the engine can. Only while paused; running requests finish first."""
        ...

    async def wake(self) -> None:
        """Allocate the device memory again. Weights may have to be sent again."""
        ...
