"""The learner's end of a publish: the tensors to send, their order, and the sender."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from strop.models.adapters import CONFIG_FILE, WEIGHTS_FILE, base_weights, lora_layers, save_adapters
from strop.models.layers.rounded_layers import weight_roundings
from strop.weight_sync.base import AdapterFiles, ChannelAddress, Manifest, NamedTensors, Sender, TensorEntry, TransportError
from strop.weight_sync.fingerprints import fingerprint, normalize_zeros
from strop.weight_sync.transports.manifest import build_manifest, deal_entries, move_large_to_middle, split_manifest
from strop.weight_sync.weight_source import (
    DealtWeight,
    OutgoingWeights,
    RoundedWeights,
    SentPrecision,
    UntiedWeights,
    Weight,
    WeightSnapshot,
    gather_dealt,
    local_weights,
    remove_tied,
)

MakeSender = Callable[[int], Sender]
"""Create a sender for the given number of receivers."""

TransferContent = Literal["weights", "last", "base"]
"""The learner's current weights, those of the last publish (resent), or the base weights below LoRA adapters."""


@dataclass(frozen=True)
class TransferPlan:
    """The tensors that the next ``send`` will send."""

    manifest: Manifest
    aliases: Mapping[str, str]  # name of a tied tensor, which is not sent -> name of the tensor it is tied to


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints by tensor name: as sent, and with -0.0 replaced by 0.0 for comparison with what an engine reads back."""

    sent: Mapping[str, int]
    read_back: Mapping[str, int]  # empty unless requested
    experts: Mapping[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # fingerprints of single experts, which add up to that of the whole tensor


@dataclass(frozen=True)
class SentAdapters:
    """LoRA adapters to load into engines."""

    files: AdapterFiles
    fingerprints: Mapping[str, int]  # fingerprints in an engine's representation


@dataclass(frozen=True, eq=False)
class PreparedWeights:
    """The weights to send, and the sender of each."""

    weights: tuple[DealtWeight, ...]  # all weights; from a snapshot, only those that this rank sends
    manifest: Manifest  # of all senders together
    aliases: Mapping[str, str]


class Exporter(Protocol):
    """The learner's end of a publish, as the weight publisher sees it."""

    async def prepare(self, content: TransferContent) -> TransferPlan: ...

    async def open(self, receivers: int) -> ChannelAddress:
        """Replace the previous sender by a new one and return its address."""
        ...

    async def send(self, *, read_back: bool) -> Fingerprints:
        """Send the prepared tensors to every receiver. Returns when all have read them. Raises TransportError."""
        ...

    async def export_adapters(self, *, resend: bool) -> SentAdapters:
        """Return the current adapters, or with ``resend`` those of the last publish."""
        ...

    async def close(self) -> None:
        """Close the sender. A ``send`` in progress fails immediately."""
        ...


class AdapterSource(Protocol):
    """The adapters of a learner that trains only adapters."""

    def base_weights(self) -> Iterable[Weight]:
        """Return the base weights, which do not change."""
        ...

    def export_files(self) -> AdapterFiles: ...

    def fingerprints(self, dtype: torch.dtype) -> Mapping[str, int]:
        """Return fingerprints of the adapters as an engine of this data type stores them."""
        ...


class NamedAdapter(Protocol):
    """The adapter of a layer."""

    @property
    def name(self) -> str: ...

    @property
    def scale(self) -> float: ...


@dataclass(frozen=True)
class SenderRole:
    """The ranks that send weights, and which rank this process is."""

    rank: int = 0
    senders: tuple[int, ...] = (0,)  # tensors are distributed over them in this order

    @property
    def sends(self) -> bool:
        return self.rank in self.senders


class BlockingExporter:
    """The learner's end of a publish in one of its processes. Its methods block.

    All ranks call ``prepare``, ``send`` and ``export_adapters`` together: each of ``role.senders`` gathers and sends the tensors that are
    dealt to it, the others only take part in gathering.
    """

    def __init__(
        self,
        weights: Callable[[], Iterable[Weight]],
        make_sender: MakeSender,
        *,
        dtype: torch.dtype,
        keep_snapshot: bool = False,
        adapters: AdapterSource | None = None,
        role: SenderRole = SenderRole(),
        quantization: SentPrecision | None = None,
    ) -> None:
        """Create an exporter.

        Args:
            weights: Returns the learner's current weights.
            make_sender: Creates a sender for a number of receivers.
            dtype: Data type of the engines' weights.
            keep_snapshot: Keep a copy of the last publish, for engines that restart after the learner has moved on.
            adapters: The LoRA adapters of a learner that trains only adapters.
            role: Which ranks send. By default this process is the only one.
            quantization: How the engines' weights are quantised; None: they are not.
        """
        self.make_sender = make_sender
        self.role = role
        self.keep_snapshot = keep_snapshot
        self._weights = weights
        self._dtype = dtype
        self._adapters = adapters
        self._quantization = quantization
        self._snapshot = WeightSnapshot() if keep_snapshot and adapters is None else None
        self._prepared = PreparedWeights((), Manifest(()), {})
        self._last_adapters: SentAdapters | None = None
        self._sender: Sender | None = None

    def prepare(self, content: TransferContent) -> TransferPlan:
        if content != "last" or self._snapshot is None:
            self._prepared = self._collect(content)
        return TransferPlan(self._prepared.manifest, self._prepared.aliases)

    def _collect(self, content: TransferContent) -> PreparedWeights:
        if content == "base":
            assert self._adapters is not None
            return self._deal(remove_tied(self._adapters.base_weights()))
        untied = remove_tied(self._weights())
        prepared = self._deal(UntiedWeights(tuple(move_large_to_middle(untied.weights)), untied.aliases))
        if self._snapshot is None:
            return prepared
        own = self._snapshot.update(gather_dealt(prepared.weights, self.role.rank), self._dtype)
        return replace(prepared, weights=tuple(DealtWeight(weight, self.role.rank) for weight in own))

    def _deal(self, untied: UntiedWeights) -> PreparedWeights:
        manifest = self._pack_entries(
            build_manifest(((weight.name, weight.spec) for weight in untied.weights), self._dtype), untied.aliases
        )
        owners = deal_entries(manifest, len(self.role.senders))
        dealt = (DealtWeight(weight, self.role.senders[owner]) for weight, owner in zip(untied.weights, owners, strict=True))
        return PreparedWeights(tuple(dealt), manifest, untied.aliases)

    def _pack_entries(self, manifest: Manifest, aliases: Iterable[str]) -> Manifest:
        """Return the manifest in which quantised weights are entered as bytes."""
        precision = self._quantization
        if precision is None:
            return manifest
        selected = precision.select((*manifest.names, *aliases))
        sizes = {
            entry.name: precision.packed_size(entry.name, entry.shape) for entry in manifest.entries if entry.name in selected
        }
        packed = {name: TensorEntry(name, torch.uint8, (size,)) for name, size in sizes.items() if size is not None}
        return Manifest(tuple(packed.get(entry.name, entry) for entry in manifest.entries))

    def _select_rounded(self) -> RoundedWeights | None:
        if self._quantization is None:
            return None
        prepared = self._prepared
        return RoundedWeights(self._quantization, self._quantization.select((*prepared.manifest.names, *prepared.aliases)))

    def _own_manifest(self) -> Manifest:
        """Return the tensors that this rank sends."""
        if not self.role.sends:
            return Manifest(())
        return split_manifest(self._prepared.manifest, len(self.role.senders))[self.role.senders.index(self.role.rank)]

    def open(self, receivers: int) -> ChannelAddress:
        self.close()
        self._sender = self.make_sender(receivers)
        return self._sender.address

    def send(self, *, read_back: bool) -> Fingerprints:
        gathered = gather_dealt(self._prepared.weights, self.role.rank)
        outgoing = OutgoingWeights(gathered, self._own_manifest(), read_back=read_back, rounded=self._select_rounded())
        sender = self._sender
        try:
            if sender is None and self.role.sends:  # closed by another thread because an engine failed before the transfer
                raise TransportError("the channel was closed before anything was sent")
            if sender is not None and outgoing.manifest.entries:  # receivers expect nothing from a sender without tensors
                sender.send(outgoing.manifest, outgoing)
        finally:  # gathering is collective: finish it on all ranks even if sending failed
            outgoing.finish()
        return Fingerprints(outgoing.sent_fingerprints, outgoing.read_back_fingerprints, outgoing.expert_fingerprints)

    def export_adapters(self, *, resend: bool) -> SentAdapters:
        assert self._adapters is not None
        if self._last_adapters is None or not (resend and self.keep_snapshot):
            self._last_adapters = SentAdapters(self._adapters.export_files(), self._adapters.fingerprints(self._dtype))
        return self._last_adapters

    def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


class LocalExporter:
    """An ``Exporter`` over the learner of this process. Blocking calls run in a thread."""

    def __init__(self, export: BlockingExporter) -> None:
        self.export = export

    async def prepare(self, content: TransferContent) -> TransferPlan:
        return self.export.prepare(content)

    async def open(self, receivers: int) -> ChannelAddress:
        return await asyncio.to_thread(self.export.open, receivers)

    async def send(self, *, read_back: bool) -> Fingerprints:
        return await asyncio.to_thread(self.export.send, read_back=read_back)

    async def export_adapters(self, *, resend: bool) -> SentAdapters:
        return self.export.export_adapters(resend=resend)

    async def close(self) -> None:
        await asyncio.to_thread(self.export.close)


def make_local_exporter(
    tensors: Callable[[], NamedTensors],
    make_sender: MakeSender,
    *,
    dtype: torch.dtype,
    keep_snapshot: bool = False,
    adapters: AdapterSource | None = None,
    device: torch.device | None = None,
    roundings: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({}),
    quantization: SentPrecision | None = None,
) -> LocalExporter:
    """Create an exporter for an unsharded model in this process. ``tensors`` returns its weights under canonical names.

    ``device``: where the weights are sent from, if they may be offloaded; ``roundings``: rounding functions of fake-quantised
    weights, by name; ``quantization``: quantisation of the engines' weights.
    """
    return LocalExporter(
        BlockingExporter(
            lambda: local_weights(tensors(), device, roundings),
            make_sender,
            dtype=dtype,
            keep_snapshot=keep_snapshot,
            adapters=adapters,
            quantization=quantization,
        )
    )


class LocalAdapterSource:
    """The adapters and base weights of a model in this process."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def base_weights(self) -> Iterable[Weight]:
        return local_weights(base_weights(self.model), roundings=weight_roundings(self.model))

    def export_files(self) -> AdapterFiles:
        with tempfile.TemporaryDirectory(prefix="strop-adapter-") as name:
            save_adapters(self.model, Path(name))
            return read_adapter_files(Path(name))

    @torch.no_grad()
    def fingerprints(self, dtype: torch.dtype) -> Mapping[str, int]:
        return fingerprint_adapters(((layer, layer.down, layer.up) for layer in lora_layers(self.model)), dtype)


def read_adapter_files(folder: Path) -> AdapterFiles:
    return AdapterFiles((folder / WEIGHTS_FILE).read_bytes(), (folder / CONFIG_FILE).read_text())


def fingerprint_adapters(layers: Iterable[tuple[NamedAdapter, Tensor, Tensor]], dtype: torch.dtype) -> Mapping[str, int]:
    """Return fingerprints of adapters, given as (layer, full A, full B), by ``<layer>.A`` and ``<layer>.B``.

    B is multiplied by the scale, as engines store it.
    """
    result: dict[str, int] = {}
    for layer, down, up in layers:
        up = up.detach().to(dtype)
        up = up if layer.scale == 1 else up * layer.scale
        for side, matrix in (("A", down.detach().to(dtype)), ("B", up)):
            result[f"{layer.name}.{side}"] = fingerprint(normalize_zeros(matrix))
    return result
