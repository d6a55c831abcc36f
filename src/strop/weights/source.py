"""A learner's weights as they are sent: no tensor twice, in the engine's data type, with fingerprints taken on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strop.weights.base import Manifest, NamedTensors
from strop.weights.fingerprints import fingerprint, positive_zeros


@dataclass(frozen=True, eq=False)
class Weight:
    """One tensor of a learner, which may lie in pieces on several ranks until it is taken."""

    name: str  # canonical
    like: Tensor  # of its shape and data type; maybe on the meta device
    take: Callable[[], Tensor]  # the whole of it; a collective of all ranks where it lies on several
    storage: tuple[int, ...]  # equal for weights that are tied


def weights_of(tensors: NamedTensors) -> list[Weight]:
    """Those of a model in this process. Only what shares its memory whole, in the same shape, is tied; adapters merged on the fly are new
    tensors each time."""
    return [
        Weight(name, tensor.detach(), _the(tensor.detach()), (tensor.data_ptr(), *tensor.shape, *tensor.stride()))
        for name, tensor in tensors
    ]


def _the(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


@dataclass(frozen=True)
class Distinct:
    """Weights without those that are tied to an earlier one."""

    weights: tuple[Weight, ...]
    aliases: dict[str, str]  # the name of a tied tensor -> the name of the one it is tied to


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
    """One publish on its way: an iterable that notes the fingerprints of what it gives."""

    weights: Sequence[Weight]
    manifest: Manifest
    held: bool  # also of the tensors with positive zeros, for what will be read back
    sent_marks: dict[str, int] = field(default_factory=dict)
    held_marks: dict[str, int] = field(default_factory=dict)
    taken: int = 0  # weights that were taken so far

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
    """A copy of the weights of the last publish, for an engine that starts anew while the learner has gone on."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, weights: Sequence[Weight], dtype: torch.dtype) -> list[Weight]:
        """Into the memory of the last one, in the types they are sent in."""
        for weight in weights:
            wanted = dtype if weight.like.is_floating_point() else weight.like.dtype
            if weight.name not in self._tensors:
                self._tensors[weight.name] = torch.empty(weight.like.shape, dtype=wanted, device="cpu")
            self._tensors[weight.name].copy_(weight.take())
        return weights_of(self._tensors.items())
