"""A learner's weights as they are sent: tied tensors once, in the engine's data type, fingerprinted on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from strop.weight_sync.base import Manifest, NamedTensors
from strop.weight_sync.fingerprints import fingerprint, normalize_zeros


@dataclass(frozen=True, eq=False)
class Weight:
    """One tensor of a learner, which may be sharded over ranks until it is gathered."""

    name: str  # canonical
    spec: Tensor  # has its global shape and data type; may be on the meta device
    gather: Callable[[], Tensor]  # returns the full tensor; a collective of all ranks if it is sharded
    storage_key: tuple[int, ...]  # equal for tied weights


def local_weights(tensors: NamedTensors, device: torch.device | None = None) -> list[Weight]:
    """Return the weights of an unsharded model in this process. ``device``: where they are sent from; None: where they are.

    Tensors are tied if they share all their memory, with equal shape and strides. Adapters that are merged on the fly are new tensors each
    time, so they are never tied.
    """
    return [
        Weight(
            name,
            tensor.detach(),
            partial(torch.Tensor.to, tensor.detach(), device or tensor.device),
            (tensor.data_ptr(), *tensor.shape, *tensor.stride()),
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


@dataclass
class OutgoingWeights:
    """The tensors of one publish: an iterable that gathers and casts them and records their fingerprints."""

    weights: Sequence[Weight]
    manifest: Manifest
    read_back: bool  # also fingerprint the tensors with -0.0 replaced by 0.0, for comparison with what is read back
    sent_fingerprints: dict[str, int] = field(default_factory=dict)
    read_back_fingerprints: dict[str, int] = field(default_factory=dict)
    num_gathered: int = 0  # number of weights gathered so far

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        dtypes = {entry.name: entry.dtype for entry in self.manifest.entries}
        for weight in self.weights:
            self.num_gathered += 1
            cast = weight.gather().detach().to(dtypes[weight.name])
            self.sent_fingerprints[weight.name] = fingerprint(cast)
            if self.read_back:
                self.read_back_fingerprints[weight.name] = fingerprint(normalize_zeros(cast))
            yield weight.name, cast


class WeightSnapshot:
    """A CPU copy of the weights of the last publish, for engines that restart after the learner has moved on."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, weights: Sequence[Weight], dtype: torch.dtype) -> list[Weight]:
        """Copy ``weights`` into the snapshot, reusing its memory, in the data types they are sent in. Return the copies."""
        for weight in weights:
            sent_dtype = dtype if weight.spec.is_floating_point() else weight.spec.dtype
            if weight.name not in self._tensors:
                self._tensors[weight.name] = torch.empty(weight.spec.shape, dtype=sent_dtype, device="cpu")
            self._tensors[weight.name].copy_(weight.gather())
        return local_weights(self._tensors.items())
