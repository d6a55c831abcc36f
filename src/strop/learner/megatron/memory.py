"""The tensors that Megatron Core's objects hold: weights, gradients, optimizer state, and views of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def find_tensors(roots: Iterable[Any]) -> Iterator[Tensor]:
    """Yield every tensor that is reachable from ``roots`` through containers, modules, optimizers and Megatron Core's objects, once.

    Views of a buffer stand in many places (buckets, shards of the distributed optimizer, ``main_grad``), and each of them keeps its memory
    alive.
    """
    seen: set[int] = set()
    pending: list[Any] = list(roots)
    while pending:
        found = pending.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            yield found
            pending += [value for value in vars(found).values() if isinstance(value, Tensor)]  # main_grad, main_param
            pending += [] if found.grad is None else [found.grad]
        elif isinstance(found, Mapping):
            pending += [*found.keys(), *found.values()]
        elif isinstance(found, list | tuple | set | frozenset):
            pending += found
        elif isinstance(found, nn.Module | torch.optim.Optimizer) or type(found).__module__.startswith("megatron."):
            pending += vars(found).values() if hasattr(found, "__dict__") else ()


def memory_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the memory of tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.untyped_storage().nbytes()}
