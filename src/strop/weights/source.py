"""A learner's weights as they are sent: no tensor twice, in the engine's data type, with fingerprints taken on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strop.weights.base import Manifest, NamedTensors
from strop.weights.fingerprints import fingerprint, positive_zeros


@dataclass(frozen=True)
class Distinct:
    """Named tensors without those that are tied to an earlier one."""

    tensors: tuple[tuple[str, Tensor], ...]
    aliases: dict[str, str]  # the name of a tied tensor -> the name of the one it is tied to


def distinct(tensors: Iterable[tuple[str, Tensor]]) -> Distinct:
    """Only what shares its memory whole, in the same shape, is tied; adapters merged on the fly are new tensors each time."""
    first: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    kept: list[tuple[str, Tensor]] = []
    aliases: dict[str, str] = {}
    for name, tensor in tensors:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        kept.append((name, tensor.detach()))
    return Distinct(tuple(kept), aliases)


@dataclass
class Outgoing:
    """One publish on its way: an iterable that notes the fingerprints of what it gives."""

    tensors: NamedTensors
    manifest: Manifest
    held: bool  # also of the tensors with positive zeros, for what will be read back
    sent_marks: dict[str, int] = field(default_factory=dict)
    held_marks: dict[str, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        types = {entry.name: entry.dtype for entry in self.manifest.entries}
        for name, tensor in self.tensors:
            cast = tensor.detach().to(types[name])
            self.sent_marks[name] = fingerprint(cast)
            if self.held:
                self.held_marks[name] = fingerprint(positive_zeros(cast))
            yield name, cast


class Snapshot:
    """A copy of the weights of the last publish, for an engine that starts anew while the learner has gone on."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: NamedTensors, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
        """Into the memory of the last one, in the types they are sent in."""
        for name, tensor in tensors:
            wanted = dtype if tensor.is_floating_point() else tensor.dtype
            if name not in self._tensors:
                self._tensors[name] = torch.empty(tensor.shape, dtype=wanted, device="cpu")
            self._tensors[name].copy_(tensor)
        return list(self._tensors.items())
