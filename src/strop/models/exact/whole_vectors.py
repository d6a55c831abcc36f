"""Elementwise functions whose result depends on nothing but the element.

A vectorised kernel computes the last elements of an array, and those at the end of each thread's share, one by one with another
implementation, whose last bit may differ (measured for SiLU, GELU, sigmoid and the reciprocal square root). Here arrays are padded so that
no share has such a remainder.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

VECTOR = 64  # elements; at least two vectors of every width and dtype, which kernels take at once
GRAIN = 32768  # elements of a thread's share, at least (at::internal::GRAIN_SIZE)


def padded_size(count: int, threads: int) -> int:
    """Return the smallest size of at least ``count`` elements whose share of every thread is a multiple of whole vectors."""
    size = -(-count // VECTOR) * VECTOR
    while True:
        step = VECTOR * min(threads, -(-size // GRAIN))
        if size % step == 0:
            return size
        size = -(-size // step) * step


def apply_whole_vectors(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Return ``function(values)`` for an elementwise function, any shape. Differentiable if the function is."""
    if values.device.type != "cpu" or not values.is_floating_point():
        return function(values)
    size = padded_size(values.numel(), torch.get_num_threads())
    if size == values.numel():
        return function(values.contiguous())
    padded = torch.nn.functional.pad(values.reshape(-1), (0, size - values.numel()), value=1.0)  # 1: finite with every function
    return function(padded)[: values.numel()].view(values.shape)
