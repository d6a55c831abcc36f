"""The learner's end of a publish: what is sent, in which order, through which sender."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from strop.weights.base import AdapterFiles, ChannelAddress, Manifest, NamedTensors, Sender, TransportError
from strop.weights.manifest import large_in_the_middle, manifest_of
from strop.weights.source import Distinct, Outgoing, Snapshot, Weight, distinct, weights_of

MakeSender = Callable[[int], Sender]
"""For a number of receivers."""

Content = Literal["weights", "last", "base"]
"""The learner's weights as they are now; those of the last publish once more; those that low-rank adapters stand on."""


@dataclass(frozen=True)
class Shipment:
    """What the next ``send`` will send."""

    manifest: Manifest
    aliases: Mapping[str, str]  # the name of a tied tensor, which is not sent -> the name of the one it is tied to


@dataclass(frozen=True)
class Marks:
    """Fingerprints by name: of what was sent, and of the same with its zeros made positive, if they were asked for."""

    sent: Mapping[str, int]
    held: Mapping[str, int]


@dataclass(frozen=True)
class SentAdapters:
    """Low-rank adapters as they are now."""

    files: AdapterFiles
    marks: Mapping[str, int]  # fingerprints, as an engine holds them


class Exporter(Protocol):
    """The learner's end as the driver of a publish sees it."""

    async def prepare(self, content: Content) -> Shipment: ...

    async def open(self, receivers: int) -> ChannelAddress:
        """A new sender, in place of the one before."""
        ...

    async def send(self, *, held: bool) -> Marks:
        """What was prepared, to every receiver; returns when all have taken it. Raises TransportError."""
        ...

    async def adapters(self, *, again: bool) -> SentAdapters:
        """``again``: those of the last publish."""
        ...

    async def close(self) -> None:
        """End the sender; a ``send`` in progress fails at once."""
        ...


class AdapterSource(Protocol):
    """A learner that trains adapters alone."""

    def base(self) -> Iterable[Weight]:
        """The weights that the adapters stand on, which do not change."""
        ...

    def files(self) -> AdapterFiles: ...

    def marks(self, dtype: torch.dtype) -> Mapping[str, int]:
        """The fingerprints of the adapters as an engine of this type holds them."""
        ...


class WeightExport:
    """The learner's end in the process that sends."""

    def __init__(
        self,
        weights: Callable[[], Iterable[Weight]],
        make_sender: MakeSender,
        *,
        dtype: torch.dtype,
        keep_copy: bool = False,
        adapters: AdapterSource | None = None,
        sends: bool = True,
    ) -> None:
        """``dtype``: in which engines hold weights. ``keep_copy``: an engine may start anew while the learner has gone on. ``sends`` false:
        another rank does, and this one takes part in gathering."""
        self.make_sender = make_sender
        self.sends = sends
        self.keep_copy = keep_copy
        self._weights = weights
        self._dtype = dtype
        self._adapters = adapters
        self._snapshot = Snapshot() if keep_copy and adapters is None else None
        self._ready = Distinct((), {})
        self._last: SentAdapters | None = None
        self._sender: Sender | None = None

    def prepare(self, content: Content) -> Shipment:
        if content != "last" or self._snapshot is None:
            self._ready = self._read(content)
        return Shipment(self._manifest(), self._ready.aliases)

    def _read(self, content: Content) -> Distinct:
        if content == "base":
            assert self._adapters is not None
            return distinct(self._adapters.base())
        found = distinct(self._weights())
        ordered = tuple(large_in_the_middle(found.weights))
        if self._snapshot is None:
            return Distinct(ordered, found.aliases)
        if self.sends:
            return Distinct(tuple(self._snapshot.take(ordered, self._dtype)), found.aliases)
        _take_all(ordered)
        return Distinct((), found.aliases)

    def _manifest(self) -> Manifest:
        return manifest_of(((weight.name, weight.like) for weight in self._ready.weights), self._dtype)

    def open(self, receivers: int) -> ChannelAddress:
        self.close()
        self._sender = self.make_sender(receivers)
        return self._sender.address

    def send(self, *, held: bool) -> Marks:
        outgoing = Outgoing(self._ready.weights, self._manifest(), held=held)
        sender = self._sender
        try:
            if sender is None and self.sends:  # another thread closed it, since a receiver refused what was to come
                raise TransportError("the channel was closed before anything was sent")
            if sender is not None:
                sender.send(outgoing.manifest, outgoing)
        finally:  # whatever became of the sending, all ranks gather to the end
            _take_all(self._ready.weights[outgoing.taken :])
        return Marks(outgoing.sent_marks, outgoing.held_marks)

    def adapters(self, *, again: bool) -> SentAdapters:
        assert self._adapters is not None
        if self._last is None or not (again and self.keep_copy):
            self._last = SentAdapters(self._adapters.files(), self._adapters.marks(self._dtype))
        return self._last

    def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


def _take_all(weights: Sequence[Weight]) -> None:
    for weight in weights:
        weight.take()


class LocalExporter:
    """The learner of this process. What blocks runs in a thread."""

    def __init__(self, export: WeightExport) -> None:
        self.export = export

    async def prepare(self, content: Content) -> Shipment:
        return self.export.prepare(content)

    async def open(self, receivers: int) -> ChannelAddress:
        return await asyncio.to_thread(self.export.open, receivers)

    async def send(self, *, held: bool) -> Marks:
        return await asyncio.to_thread(self.export.send, held=held)

    async def adapters(self, *, again: bool) -> SentAdapters:
        return self.export.adapters(again=again)

    async def close(self) -> None:
        await asyncio.to_thread(self.export.close)


def local_exporter(
    tensors: Callable[[], NamedTensors],
    make_sender: MakeSender,
    *,
    dtype: torch.dtype,
    keep_copy: bool = False,
    adapters: AdapterSource | None = None,
) -> LocalExporter:
    """For a model that lies whole in this process; ``tensors`` gives its weights under canonical names."""
    return LocalExporter(
        WeightExport(lambda: weights_of(tensors()), make_sender, dtype=dtype, keep_copy=keep_copy, adapters=adapters)
    )
