"""Fingerprints of tensors that can be added up over shards: the proof that weights arrived.

A tensor is read as a table of bytes: a row for each index of its first dimension, the rest flattened (a vector has one element a row, a
scalar is one row). With a coefficient for each global row and one for each global column of bytes,

    F = sum over i, k of a(i) b(k) byte(i, k)   modulo 2^64,   bytes from -128 to 127,

so shards of rows, of columns, or of both have fingerprints that add up to that of the whole when each is told where it begins. All
coefficients are odd and pseudo-random: a single changed byte changes F with certainty, and any other change goes unseen with a chance of
about 2^-56. It is a sum of integers, so every device, number of threads and order of addition gives the same number. It is no signature:
whoever knows the coefficients can forge one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

MODULUS = 1 << 64
_DIGITS = 8  # b(k) is cut into digits to base 2^8, each an int8
_WIDEST = 1 << 17  # byte columns of one product: 2^17 x 128 x 64 fits an int32
_NARROW = 32  # below so many byte columns a matrix product is more work than the plain formula
_CHUNK = 1 << 20  # bytes that are copied or widened at a time, so that they stay in the cache
_CUDA_CHUNK = 1 << 26
_TALLEST = 1 << 16  # rows at a time, whose coefficients are kept


def fingerprint(tensor: Tensor, *, rows: int = 0, columns: int = 0) -> int:
    """The fingerprint of a tensor's bits, from 0 to 2^64 - 1.

    ``tensor`` may be a shard: ``rows`` is the global index of its first row (of its first dimension), ``columns`` that of its first column,
    counted in elements of the other dimensions, flattened. What is cut along an inner dimension is the sum of its pieces that are columns.
    +0.0 and -0.0 differ, and so do two NaNs with different bits. Any dtype of one byte or more; complex ones as their parts.
    """
    table = _table(tensor.detach())
    start, total = columns * tensor.element_size(), 0
    for left in range(0, table.shape[1], _WIDEST):
        part = table[:, left : left + _WIDEST]
        total += _fingerprint(part, rows, start + left)
    return total % MODULUS


def positive_zeros(tensor: Tensor) -> Tensor:
    """The same numbers with -0.0 as 0.0, for the fingerprints of what is read back: a product with the identity cannot tell them apart."""
    return tensor + 0.0 if tensor.is_floating_point() else tensor


def combine(parts: Iterable[int]) -> int:
    """The fingerprint of the whole from those of its shards, each taken with its offsets."""
    return sum(parts) % MODULUS


def _table(tensor: Tensor) -> Tensor:
    """[rows, bytes of a row] int8; a view where the memory allows it."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)
    flat = tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1) if tensor.numel() else tensor.new_empty(0, 1)
    if (flat.stride(1) != 1 and flat.shape[1] > 1) or (flat.shape[1] == 1 and not flat.is_contiguous()):
        flat = flat.contiguous()
    return flat.view(torch.int8)


def _fingerprint(table: Tensor, rows: int, start: int) -> int:
    """Of [R, K] bytes whose first byte has the global index (rows, start)."""
    by_matrix_product = table.device.type == "cpu" and table.shape[1] >= _NARROW and _has_int8_products()
    step = min(_TALLEST, max(1, (_CUDA_CHUNK if table.is_cuda else _CHUNK) // max(1, table.shape[1])))
    if by_matrix_product and table.is_contiguous():
        step = max(step, 4096)  # nothing is copied: only eight sums for each row are kept
    total = 0
    for top in range(0, table.shape[0], step):
        part = table[top : top + step]
        coefficients = _row_coefficients(rows + top, len(part), table.device)
        total += _by_product(part, start, coefficients) if by_matrix_product else _by_definition(part, start, coefficients)
    return total


def _by_definition(part: Tensor, start: int, coefficients: Tensor) -> int:
    """Row by row the sum over k of b(k) byte(i, k), then the sum of those with ``coefficients`` [R]: on any device."""
    sums = (part * _column_coefficients(start, part.shape[1], part.device)).sum(1)
    return int((sums * coefficients).sum())


def _by_product(part: Tensor, start: int, coefficients: Tensor) -> int:
    """The same from an int8 matrix product with the digits of b, which reads the bytes as they lie, at the speed of memory."""
    sums = torch._int_mm(part.contiguous(), _column_digits(start, part.shape[1]))  # [R, digits] int32, exact
    digits: list[int] = torch.mv(sums.long().t(), coefficients).tolist()
    return sum(value << 8 * place for place, value in enumerate(digits))


@lru_cache(maxsize=1)
def _has_int8_products() -> bool:
    """Whether this build multiplies int8 matrices exactly."""
    left = torch.full((3, 64), -128, dtype=torch.int8)
    right = torch.full((64, _DIGITS), -64, dtype=torch.int8)
    try:
        return bool((torch._int_mm(left, right) == 64 * 128 * 64).all())
    except (AttributeError, RuntimeError):
        return False


# ---- coefficients, from the global index alone ----


def _mix(index: Tensor, seed: int) -> Tensor:
    """splitmix64 of each index, as int64 that wraps around."""
    found = (index + seed) * -7046029254386353131
    found = (found ^ _shift_right(found, 30)) * -4658895280553007687
    found = (found ^ _shift_right(found, 27)) * -7723592293110705685
    return found ^ _shift_right(found, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Without the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@lru_cache(maxsize=1)
def _shifts() -> Tensor:
    return torch.arange(_DIGITS) * 8


@lru_cache(maxsize=256)
def _row_coefficients(start: int, count: int, device: torch.device) -> Tensor:
    """a(start .. start + count): [count] int64, odd."""
    return (_mix(torch.arange(start, start + count), 0x5EED) | 1).to(device)


@lru_cache(maxsize=64)
def _column_digits(start: int, count: int) -> Tensor:
    """b(start .. start + count) to base 256: [count, 8] int8 from -64 to 63, the first one odd.

    Half of what an int8 holds: instruction sets that add two products into 16 bits do not saturate either.
    """
    mixed = _mix(torch.arange(start, start + count), 0xB17E)
    digits = (mixed[:, None] >> _shifts()) & 127
    digits[:, 0] |= 1
    return (digits - 64).to(torch.int8)


@lru_cache(maxsize=64)
def _column_coefficients(start: int, count: int, device: torch.device) -> Tensor:
    """b(start .. start + count): [count] int64, odd."""
    return (_column_digits(start, count).long() << _shifts()).sum(1).to(device)
