"""Many small tensors in one piece of memory, so that they travel as one.

Pickling a tensor takes a tenth of a millisecond and a kilobyte, whatever its size; a share of a batch has some twenty of them, and a
thousand ranks a thousand shares.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: a multiple of the size of every element


@dataclass(frozen=True)
class FlatTensors:
    """Tensors by name, as a pickle has them."""

    entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]  # name, data type, shape
    memory: Any  # bytes, or a buffer that travels beside the pickle

    def unflatten(self) -> dict[str, Tensor]:
        """Return the tensors, in memory of their own that may be written to."""
        memory = bytearray(memoryview(self.memory))
        tensors, start = {}, 0
        for name, dtype, shape in self.entries:
            count = torch.Size(shape).numel()
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
            tensors[name] = flat.view(shape)
            start += _padded(count * dtype.itemsize)
        return tensors


def flatten(tensors: Mapping[str, Tensor], protocol: int) -> FlatTensors:
    """Copy CPU tensors into one piece of memory, for a pickle of ``protocol``."""
    flat = torch.empty(sum(_padded(tensor.nbytes) for tensor in tensors.values()), dtype=torch.uint8)
    start = 0
    for tensor in tensors.values():
        flat[start : start + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        start += _padded(tensor.nbytes)
    entries = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    memory: Any = flat.numpy()
    return FlatTensors(entries, pickle.PickleBuffer(memory) if protocol >= 5 else memory.tobytes())


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
