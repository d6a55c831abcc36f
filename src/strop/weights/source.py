"""A learner's weights as they are sent: tied tensors once, in the engine's data type, fingerprinted on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strop.weights.base import Manifest, NamedTensors
from strop.weights.fingerprints import fingerprint, positive_zeros


@dataclass(frozen=True, eq=False)
class Weight:
    """One tensor of a learner, which may be sharded over ranks until it is gathered."""

    name: str  # canonical
    like: Tensor  # has its global shape and data type; may be on the meta device
    take: Callable[[], Tensor]  # returns the whole tensor; a collective of all ranks if it is sharded
    storage: tuple[int, ...]  # equal for tied weights


def weights_of(tensors: NamedTensors) -> list[Weight]:
    """Return the weights of an unsharded model in this process.

    Tensors are tied if they share all their memory, with equal shape and strides. Adapters that are merged on the fly are new tensors each
    time, so they are never tied.
    """
    return [
        Weight(name, tensor.detach(), tensor.detach, (tensor.data_ptr(), *tensor.shape, *tensor.stride()))
        for name, tensor in tensors
    ]


@dataclass(frozen=True)
class Distinct:
    """Weights without those that are tied to an earlier one."""

    weights: tuple[Weight, ...]
    aliases: dict[str, str]  # name of a tied tensor -> name of the tensor it is tied to


def distinct(weights: Iterable[Weight]) -> Distinct:
    first: dict[tuple[int, ...], str] = {}
    kept: list[Weight] = []
    aliases: dict[str, str] = {}
    for weight in weights:
        if weight.like.numel() and weight.storage in first:
            aliases[weight.name] = first[weight.storage]
            continue
        first[weight.storage] = weight.name
        kept.append(weight)
    return Distinct(tuple(kept), aliases)


@dataclass
class Outgoing:
    """The tensors of one publish: an iterable that gathers and casts them and records their fingerprints."""

    weights: Sequence[Weight]
    manifest: Manifest
    held: bool  # also fingerprint the tensors with -0.0 replaced by 0.0, for comparison with what is read back
    sent_marks: dict[str, int] = field(default_factory=dict)
    held_marks: dict[str, int] = field(default_factory=dict)
    taken: int = 0  # number of weights gathered so far

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        types = {entry.name: entry.dtype for entry in self.manifest.entries}
        for weight in self.weights:
            self.taken += 1
            cast = weight.take().detach().to(types[weight.name])
            self.sent_marks[weight.name] = fingerprint(cast)
            if self.held:
                self.held_marks[weight.name] = fingerprint(positive_zeros(cast))
            yield weight.name, cast


class Snapshot:
    """A CPU copy of the weights of the last publish, for engines that restart after the learner has moved on."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, weights: Sequence[Weight], dtype: torch.dtype) -> list[Weight]:
        """Copy ``weights`` into the snapshot, reusing its memory, in the data types they are sent in. Return the copies."""
        for weight in weights:
            wanted = dtype if weight.like.is_floating_point() else weight.like.dtype
            if weight.name not in self._tensors:
                self._tensors[weight.name] = torch.empty(weight.like.shape, dtype=wanted, device="cpu")
            self._tensors[weight.name].copy_(weight.take())
        return weights_of(self._tensors.items())
