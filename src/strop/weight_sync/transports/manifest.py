"""Manifests, their split into buckets and over senders: both sides compute the same."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.weight_sync.base import Manifest, NamedTensors, TensorEntry
from strop.weight_sync.weight_source import Weight, choose_sent_dtype

ALIGNMENT = 256  # bytes: a multiple of cache lines, preferred by CUDA kernels


@dataclass(frozen=True)
class BucketEntry:
    """A tensor and its position in a bucket."""

    entry: TensorEntry
    offset: int  # in bytes, aligned


@dataclass(frozen=True)
class Bucket:
    """Tensors that are transferred together."""

    tensors: tuple[BucketEntry, ...]
    nbytes: int  # in bytes, a multiple of the alignment


@dataclass(frozen=True)
class PlacedBucket:
    """A bucket and its place in a shared buffer."""

    bucket: Bucket
    start: int  # in bytes
    reads: int  # buckets that must have been read before this one is filled

    @property
    def end(self) -> int:
        return self.start + self.bucket.nbytes


def build_manifest(tensors: NamedTensors, dtype: torch.dtype | None) -> Manifest:
    """Return the manifest for sending ``tensors``, which may be meta tensors.

    ``dtype``: data type of floating-point tensors (``choose_sent_dtype``); None: their own. Raises ValueError for duplicate
    names.
    """
    entries: list[TensorEntry] = []
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise ValueError(f"two tensors are called {name}: canonical names must be unique; rename one of them or leave it out")
        seen.add(name)
        entries.append(TensorEntry(name, choose_sent_dtype(name, tensor, dtype), tuple(tensor.shape)))
    return Manifest(tuple(entries))


def move_large_to_middle(weights: Sequence[Weight]) -> list[Weight]:
    """Return the weights in sending order: the first and last buckets are small, because only one side is busy during them.

    Tensors of more than a tenth of the total size go to the middle. The others keep their order, so an engine's layers complete one by one.
    """
    sizes = [weight.spec.numel() * weight.spec.element_size() for weight in weights]
    limit = sum(sizes) / 10
    small = [weight for weight, size in zip(weights, sizes, strict=True) if size <= limit]
    large = [weight for weight, size in zip(weights, sizes, strict=True) if size > limit]
    middle = len(small) // 2
    return [*small[:middle], *large, *small[middle:]]


def split_into_buckets(manifest: Manifest, size: int) -> tuple[Bucket, ...]:
    """Split the manifest, in order, into buckets of at most ``size`` bytes. A larger tensor gets its own bucket; no tensor is split."""
    if size <= 0:
        raise ValueError(f"a bucket of {size} bytes holds nothing; the size must be positive")
    buckets: list[Bucket] = []
    current: list[BucketEntry] = []
    filled = 0
    for entry in manifest.entries:
        if current and filled + entry.nbytes > size:
            buckets.append(Bucket(tuple(current), filled))
            current, filled = [], 0
        current.append(BucketEntry(entry, filled))
        filled += align_up(entry.nbytes)
    return (*buckets, Bucket(tuple(current), filled)) if current else tuple(buckets)


def place_buckets(buckets: Sequence[Bucket], capacity: int) -> list[PlacedBucket]:
    """Place buckets one after another in a buffer, wrapping around at its end. Buckets are filled and read in order."""
    placed: list[PlacedBucket] = []
    start = reads = 0
    for bucket in buckets:
        if start + bucket.nbytes > capacity:
            start = 0
        end = start + bucket.nbytes
        while any(other.start < end and start < other.end for other in placed[reads:]):
            reads += 1
        placed.append(PlacedBucket(bucket, start, reads))
        start = end
    return placed


def align_up(size: int) -> int:
    """Round up to the next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def view_in_bucket(memory: Tensor, placed: BucketEntry, start: int = 0) -> Tensor:
    """Return a view of one tensor of the bucket that begins at byte ``start`` of ``memory`` (flat uint8)."""
    begin, entry = start + placed.offset, placed.entry
    return memory[begin : begin + entry.nbytes].view(entry.dtype).view(entry.shape)


def manifest_digest(manifest: Manifest) -> str:
    """Return a hash that is the same for equal manifests, in every process."""
    text = "\n".join(f"{entry.name} {entry.dtype} {entry.shape}" for entry in manifest.entries)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def match_tensors(manifest: Manifest, tensors: NamedTensors) -> Iterator[tuple[TensorEntry, Tensor]]:
    """Yield the manifest's entries with their tensors. Raises ValueError if the tensors do not match the manifest and its order."""
    remaining = iter(tensors)
    for entry in manifest.entries:
        name, tensor = next(remaining, ("nothing", None))
        if tensor is None or name != entry.name or tuple(tensor.shape) != entry.shape:
            got = name if tensor is None else f"{name} {tuple(tensor.shape)}"
            raise ValueError(
                f"the manifest says that {entry.name} {entry.shape} comes next, but {got} arrived: send the tensors that the manifest was "
                "built from, in the same order"
            )
        yield entry, tensor
    if (extra := next(remaining, None)) is not None:
        raise ValueError(f"{extra[0]} came after the manifest's last tensor: send the tensors that the manifest was built from")


def deal_entries(manifest: Manifest, senders: int) -> list[int]:
    """Return the sender of each tensor, from 0: largest tensors first, each to the sender with the fewest bytes; ties go to the
    first.

    No sender exceeds an even share by more than one tensor.
    """
    dealt = [0] * len(manifest.entries)
    loads = [(0, sender) for sender in range(senders)]  # a heap
    for number in sorted(range(len(dealt)), key=lambda number: -manifest.entries[number].nbytes):
        load, sender = loads[0]
        dealt[number] = sender
        heapq.heapreplace(loads, (load + manifest.entries[number].nbytes, sender))
    return dealt


def split_manifest(manifest: Manifest, senders: int) -> tuple[Manifest, ...]:
    """Return the tensors that each sender sends, in the manifest's order. A sender may have none."""
    if senders == 1:
        return (manifest,)
    dealt = deal_entries(manifest, senders)
    return tuple(
        Manifest(tuple(entry for entry, owner in zip(manifest.entries, dealt, strict=True) if owner == sender))
        for sender in range(senders)
    )
