"""The precision of published weights: the learner's, rounded to the number format used for sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from strop.weight_sync.base import Manifest, NamedTensors
from strop.weight_sync.fingerprints import combine_fingerprints, fingerprint, normalize_zeros


class SentPrecision(Protocol):
    """How and where the weights of a publish are quantised."""

    @property
    def by_engine(self) -> bool:
        """Whether the engine quantises arriving weights into its own kernels' layout; otherwise it receives rounded values."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The compute data type of the engine; weights are cast to it before they are quantised."""
        ...

    def packed_size(self, name: str, shape: Sequence[int]) -> int | None:
        """Return the size in bytes of a selected weight that is sent quantised; None: it is sent as numbers."""
        ...

    def pack(self, tensor: Tensor) -> Tensor:
        """Return the values and scales of a selected weight as bytes, [bytes] uint8."""
        ...

    def select(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names of the weights to quantise, given all names of a publish."""
        ...

    def round(self, tensor: Tensor) -> Tensor:
        """Return a selected weight as rounded by the engine, in its own data type."""
        ...


GATHERED_AHEAD = 256 << 20  # bytes of full tensors that are gathered at the same time


class PendingWeight(Protocol):
    """A weight that is being gathered on one rank."""

    def wait(self) -> Tensor | None:
        """Return the full tensor on the gathering rank, and None on the others once they have sent their shards."""
        ...


@dataclass(frozen=True, eq=False)
class Weight:
    """One tensor of a learner, which may be sharded over ranks until it is gathered."""

    name: str  # canonical
    spec: Tensor  # has its global shape and data type; may be on the meta device
    gather: Callable[[], Tensor]  # returns the full tensor; a collective of all ranks if it is sharded
    storage_key: tuple[int, ...]  # equal for tied weights
    begin_gather: Callable[[int], PendingWeight] | None = None  # starts gathering it on one rank; None: only ``gather`` exists
    rounding: Callable[[Tensor], Tensor] | None = None  # the part of the full tensor that engines receive, in the sent data type

    @property
    def nbytes(self) -> int:
        """Size in bytes of the gathered tensor."""
        return self.spec.numel() * self.spec.element_size()

    def to_sent(self, full: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gathered tensor as engines receive it: in ``dtype``, and rounded if the learner uses rounded weights."""
        cast = full.detach().to(dtype)
        return cast if self.rounding is None else self.rounding(cast)

    def begin(self, rank: int) -> PendingWeight:
        """Start gathering the tensor on ``rank``. All ranks must call it, and ``wait`` for the results, in the same order."""
        return _GatheredByAll(self.gather) if self.begin_gather is None else self.begin_gather(rank)


@dataclass(frozen=True)
class _GatheredByAll:
    """A weight gathered by all ranks, regardless of the rank that needs it."""

    gather: Callable[[], Tensor]

    def wait(self) -> Tensor:
        return self.gather()


@dataclass(frozen=True, eq=False)
class DealtWeight:
    """A weight, and the rank that sends it."""

    weight: Weight
    rank: int


@torch.no_grad()
def gather_dealt(dealt: Iterable[DealtWeight], rank: int, ahead: int = GATHERED_AHEAD) -> Iterator[tuple[Weight, Tensor]]:
    """Gather weights, each on its sending rank; yield those of this ``rank``, in order.

    Up to ``ahead`` bytes are gathered at the same time, so that one rank can send a tensor while others receive their shards. All ranks
    must iterate to the end.
    """
    pending: deque[tuple[DealtWeight, PendingWeight]] = deque()
    size = 0
    for each in dealt:
        pending.append((each, each.weight.begin(each.rank)))
        size += each.weight.nbytes
        while size > ahead and len(pending) > 1:
            size -= pending[0][0].weight.nbytes
            yield from _finish(*pending.popleft(), rank)
    while pending:
        yield from _finish(*pending.popleft(), rank)


def _finish(dealt: DealtWeight, pending: PendingWeight, rank: int) -> Iterator[tuple[Weight, Tensor]]:
    tensor = pending.wait()
    if dealt.rank == rank:
        assert tensor is not None
        yield dealt.weight, tensor


def choose_sent_dtype(name: str, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the data type used to send a tensor: ``dtype``, or its own if that is None.

    Integers keep their own, and so does a router's expert bias: engines hold it in float32, because rounding it would change the
    choice of experts.
    """
    keeps = dtype is None or not tensor.is_floating_point() or name.endswith("e_score_correction_bias")
    return tensor.dtype if dtype is None or keeps else dtype


def is_tensor_of_experts(name: str, tensor: Tensor) -> bool:
    """Whether a tensor holds the same weight of each expert of a layer, [experts, ...]."""
    return ".experts." in name and tensor.dim() >= 2 and not name.endswith(".weight")


def local_weights(
    tensors: NamedTensors,
    device: torch.device | None = None,
    roundings: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({}),
) -> list[Weight]:
    """Return the weights of an unsharded model in this process. ``device``: where they are sent from; None: where they are now.

    ``roundings``: rounding functions of fake-quantised weights, by name.

    Tensors are tied if they share all their memory, with equal shape and strides. Weights with adapters merged on the fly are new
    tensors each time, so they are never tied.
    """
    return [
        Weight(
            name,
            tensor.detach(),
            partial(torch.Tensor.to, tensor.detach(), device or tensor.device),
            (tensor.data_ptr(), *tensor.shape, *tensor.stride()),
            rounding=roundings.get(name),
        )
        for name, tensor in tensors
    ]


@dataclass(frozen=True)
class UntiedWeights:
    """Weights without those that are tied to an earlier one."""

    weights: tuple[Weight, ...]
    aliases: dict[str, str]  # name of a tied tensor -> name of the tensor it is tied to


def remove_tied(weights: Iterable[Weight]) -> UntiedWeights:
    first: dict[tuple[int, ...], str] = {}
    untied: list[Weight] = []
    aliases: dict[str, str] = {}
    for weight in weights:
        if weight.spec.numel() and weight.storage_key in first:
            aliases[weight.name] = first[weight.storage_key]
            continue
        first[weight.storage_key] = weight.name
        untied.append(weight)
    return UntiedWeights(tuple(untied), aliases)


@dataclass(frozen=True)
class RoundedWeights:
    """The weights of a publish that engines hold in low precision."""

    precision: SentPrecision
    names: frozenset[str]


@dataclass
class OutgoingWeights:
    """The tensors that one rank sends: an iterable that gathers, casts and rounds them and records their fingerprints."""

    gathered: Iterator[tuple[Weight, Tensor]]  # of ``gather_dealt``
    manifest: Manifest
    read_back: bool  # also fingerprint the tensors with -0.0 replaced by 0.0, for comparison with what is read back
    rounded: RoundedWeights | None = None
    sent_fingerprints: dict[str, int] = field(default_factory=dict)
    read_back_fingerprints: dict[str, int] = field(default_factory=dict)
    expert_fingerprints: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of single experts, for tensors with several

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        dtypes = {entry.name: entry.dtype for entry in self.manifest.entries}
        for weight, tensor in self.gathered:
            packs = self._packs(weight.name, dtypes[weight.name])
            cast = weight.to_sent(tensor, self.rounded.precision.dtype if packs and self.rounded else dtypes[weight.name])
            held = self._round(weight, cast)
            sent = cast if self.rounded is not None and self.rounded.precision.by_engine else held
            sent = self.rounded.precision.pack(cast) if packs and self.rounded else sent
            self.sent_fingerprints[weight.name] = fingerprint(sent)
            if self.read_back:
                self._fingerprint_for_read_back(weight.name, normalize_zeros(held))
            yield weight.name, sent

    def _packs(self, name: str, dtype: torch.dtype) -> bool:
        return self.rounded is not None and name in self.rounded.names and dtype is torch.uint8

    def _round(self, weight: Weight, tensor: Tensor) -> Tensor:
        """Return the values the engine will use after its own rounding of this tensor."""
        if self.rounded is None or weight.name not in self.rounded.names:
            return tensor
        if weight.rounding is not None and not self.rounded.precision.by_engine:
            return tensor  # the learner already uses rounded weights, and the engine gets the same values
        return self.rounded.precision.round(tensor)

    def _fingerprint_for_read_back(self, name: str, tensor: Tensor) -> None:
        if not is_tensor_of_experts(name, tensor):
            self.read_back_fingerprints[name] = fingerprint(tensor)
            return
        experts = tuple(fingerprint(each[None], rows=index) for index, each in enumerate(tensor))
        self.expert_fingerprints[name] = experts
        self.read_back_fingerprints[name] = combine_fingerprints(experts)

    def finish(self) -> None:
        """Gather the remaining weights: other ranks wait for this one's shards."""
        for _ in self.gathered:
            pass


class WeightSnapshot:
    """A CPU copy of the weights of the last publish, for engines that restart after the learner has moved on."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, weights: Iterable[tuple[Weight, Tensor]], dtype: torch.dtype) -> list[Weight]:
        """Copy gathered weights into the snapshot, reusing its memory, in the data types used for sending. Return the copies."""
        for weight, tensor in weights:
            sent_dtype = choose_sent_dtype(weight.name, weight.spec, dtype)
            if weight.name not in self._tensors:
                self._tensors[weight.name] = torch.empty(weight.spec.shape, dtype=sent_dtype, device="cpu")
            self._tensors[weight.name].copy_(weight.to_sent(tensor, sent_dtype))
        return local_weights(self._tensors.items())
