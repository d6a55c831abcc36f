"""Distribute the tensors of a publish over the sending processes. Both sides compute the same result from the manifest."""

from __future__ import annotations

import heapq

from strop.weight_sync.base import Manifest


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
