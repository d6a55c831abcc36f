"""The learner's end of a publish: the tensors to send, their order, and the sender."""

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
"""Create a sender for a number of receivers."""

Content = Literal["weights", "last", "base"]
"""The learner's current weights, those of the last publish again, or the base weights of LoRA adapters."""


@dataclass(frozen=True)
class Shipment:
    """The tensors that the next ``send`` will send."""

    manifest: Manifest
    aliases: Mapping[str, str]  # name of a tied tensor, which is not sent -> name of the tensor it is tied to


@dataclass(frozen=True)
class Marks:
    """Fingerprints by tensor name: as sent, and with -0.0 replaced by 0.0 for comparison with what an engine reads back."""

    sent: Mapping[str, int]
    held: Mapping[str, int]  # empty unless requested


@dataclass(frozen=True)
class SentAdapters:
    """LoRA adapters to load into engines."""

    files: AdapterFiles
    marks: Mapping[str, int]  # fingerprints in an engine's representation


class Exporter(Protocol):
    """The learner's end of a publish, as the weight publisher sees it."""

    async def prepare(self, content: Content) -> Shipment: ...

    async def open(self, receivers: int) -> ChannelAddress:
        """Replace the previous sender by a new one and return its address."""
        ...

    async def send(self, *, held: bool) -> Marks:
        """Send the prepared tensors to every receiver. Returns when all have read them. Raises TransportError."""
        ...

    async def adapters(self, *, again: bool) -> SentAdapters:
        """Return the current adapters, or with ``resend`` those of the last publish."""
        ...

    async def close(self) -> None:
        """Close the sender. A ``send`` in progress fails immediately."""
        ...


class AdapterSource(Protocol):
    """The adapters of a learner that trains only adapters."""

    def base(self) -> Iterable[Weight]:
        """Return the base weights, which do not change."""
        ...

    def files(self) -> AdapterFiles: ...

    def marks(self, dtype: torch.dtype) -> Mapping[str, int]:
        """Return fingerprints of the adapters as an engine of this data type stores them."""
        ...


class WeightExport:
    """The learner's end of a publish in the sending process. Its methods block."""

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
        """``dtype``: the data type of the engines' weights. ``keep_snapshot``: keep a copy of the last publish, for engines that restart
        after the learner has moved on. ``is_sender`` False: another rank sends; this one only takes part in gathering."""
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
            if sender is None and self.sends:  # closed by another thread, since an engine failed before the transfer
                raise TransportError("the channel was closed before anything was sent")
            if sender is not None:
                sender.send(outgoing.manifest, outgoing)
        finally:  # gathering is collective: finish it on all ranks even if sending failed
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
    """An ``Exporter`` over the learner of this process. Blocking calls run in a thread."""

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
    """Create an exporter for an unsharded model in this process. ``tensors`` returns its weights under canonical names."""
    return LocalExporter(
        WeightExport(lambda: weights_of(tensors()), make_sender, dtype=dtype, keep_copy=keep_copy, adapters=adapters)
    )
