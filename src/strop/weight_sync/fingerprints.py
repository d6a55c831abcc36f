"""Fingerprints of tensors that add up over shards, to verify that weights arrived.

A tensor is read as a table of bytes: one row for each index of its first dimension, the other dimensions flattened (a vector has one
element per row, a scalar is one row). With a coefficient for each global row and one for each global byte column,

    F = sum over i, k of a(i) b(k) byte(i, k)   modulo 2^64,   bytes from -128 to 127.

The fingerprints of shards (rows, columns, or both) add up to that of the full tensor, if each is computed with its offsets. All
coefficients are odd and pseudo-random: a single changed byte always changes F, and any other change goes undetected with a probability of
about 2^-56. F is a sum of integers, so it does not depend on device, number of threads or order of addition. It is not a cryptographic
signature: anyone who knows the coefficients can forge one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from strop.device_copies import is_gpu

MODULUS = 1 << 64
_NUM_DIGITS = 8  # b(k) is split into digits to base 2^8, each an int8
_MAX_COLUMNS = 1 << 17  # maximum byte columns of one matrix product: 2^17 x 128 x 64 fits an int32
_MIN_MATMUL_COLUMNS = 32  # with fewer byte columns a matrix product is slower than the plain formula
_CHUNK = 1 << 20  # bytes that are copied or widened at a time, to stay in the CPU cache
_GPU_CHUNK = 1 << 23  # bytes of a tensor on a GPU at a time; their products, which are int64, take eight times as many
_MAX_ROWS = 1 << 16  # maximum rows at a time, which bounds the cached coefficients


def fingerprint(tensor: Tensor, *, rows: int = 0, columns: int = 0) -> int:
    """Return the fingerprint of a tensor's bits, from 0 to 2^64 - 1.

    ``tensor`` may be a shard: ``rows`` is the global index of its first row (first dimension), ``columns`` that of its first column, in
    elements of the flattened other dimensions. For a shard along an inner dimension, add up its contiguous column ranges. +0.0 and -0.0
    differ, as do NaNs with different bits. Supports any dtype of one byte or more; complex tensors are viewed as real ones.
    """
    table = _byte_table(tensor.detach())
    start, total = columns * tensor.element_size(), 0
    for left in range(0, table.shape[1], _MAX_COLUMNS):
        part = table[:, left : left + _MAX_COLUMNS]
        total += _fingerprint_table(part, rows, start + left)
    return total % MODULUS


def normalize_zeros(tensor: Tensor) -> Tensor:
    """Replace -0.0 by 0.0, for weights that are read back: a product with the identity cannot tell the two apart."""
    return tensor + 0.0 if tensor.is_floating_point() else tensor


def combine_fingerprints(parts: Iterable[int]) -> int:
    """Return the fingerprint of a full tensor from those of its shards, each computed with its offsets."""
    return sum(parts) % MODULUS


def _byte_table(tensor: Tensor) -> Tensor:
    """Return the tensor as [rows, bytes per row] int8, as a view if its strides allow one."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)
    flat = tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1) if tensor.numel() else tensor.new_empty(0, 1)
    if (flat.stride(1) != 1 and flat.shape[1] > 1) or (flat.shape[1] == 1 and not flat.is_contiguous()):
        flat = flat.contiguous()
    return flat.view(torch.int8)


def _fingerprint_table(table: Tensor, rows: int, start: int) -> int:
    """Return the fingerprint of bytes [R, K]; the first one has the global index (rows, start)."""
    if is_gpu(table.device):
        return _sum_on_gpu(table, rows, start)
    use_matmul = table.device.type == "cpu" and table.shape[1] >= _MIN_MATMUL_COLUMNS and _has_exact_int8_matmul()
    step = min(_MAX_ROWS, max(1, _CHUNK // max(1, table.shape[1])))
    if use_matmul and table.is_contiguous():
        step = max(step, 4096)  # no copy is made here: only eight sums per row need memory
    total = 0
    for top in range(0, table.shape[0], step):
        part = table[top : top + step]
        coefficients = _row_coefficients(rows + top, len(part), table.device)
        total += _sum_by_matmul(part, start, coefficients) if use_matmul else _sum_by_definition(part, start, coefficients)
    return total


def _sum_by_definition(part: Tensor, start: int, coefficients: Tensor) -> int:
    """Sum b(k) byte(i, k) over k for each row, then the rows weighted by ``coefficients`` [R]."""
    return int(_weighted_sum(part, _column_coefficients(start, part.shape[1], part.device), coefficients))


def _weighted_sum(part: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    return ((part * columns).sum(1) * rows).sum()


def _sum_on_gpu(table: Tensor, rows: int, start: int) -> int:
    """Compute the same of a table on a GPU, in chunks. The host waits once, for the sum."""
    columns = _column_coefficients(start, table.shape[1], table.device)
    step = min(_MAX_ROWS, max(1, _GPU_CHUNK // max(1, table.shape[1])))
    total = torch.zeros((), dtype=torch.int64, device=table.device)
    for top in range(0, table.shape[0], step):
        part = table[top : top + step]
        total += _weighted_sum(part, columns, _row_coefficients(rows + top, len(part), table.device))
    return int(total)


def _sum_by_matmul(part: Tensor, start: int, coefficients: Tensor) -> int:
    """Compute the same by an int8 matrix product with the digits of b, which reads the bytes in place at memory bandwidth."""
    sums = torch._int_mm(part.contiguous(), _column_digits(start, part.shape[1], part.device))  # [R, digits] int32, exact
    digits: list[int] = torch.mv(sums.long().t(), coefficients).tolist()
    return sum(value << 8 * index for index, value in enumerate(digits))


@lru_cache(maxsize=1)
def _has_exact_int8_matmul() -> bool:
    """Whether this build of torch multiplies int8 matrices exactly."""
    left = torch.full((3, 64), -128, dtype=torch.int8)
    right = torch.full((64, _NUM_DIGITS), -64, dtype=torch.int8)
    try:
        return bool((torch._int_mm(left, right) == 64 * 128 * 64).all())
    except (AttributeError, RuntimeError):
        return False


# ---- coefficients, computed from the global index ----


def _splitmix64(index: Tensor, seed: int) -> Tensor:
    """Return splitmix64 of each index, in wrapping int64 arithmetic."""
    mixed = (index + seed) * -7046029254386353131
    mixed = (mixed ^ _shift_right(mixed, 30)) * -4658895280553007687
    mixed = (mixed ^ _shift_right(mixed, 27)) * -7723592293110705685
    return mixed ^ _shift_right(mixed, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@lru_cache(maxsize=2)
def _shifts(device: torch.device) -> Tensor:
    return torch.arange(_NUM_DIGITS, device=device) * 8


@lru_cache(maxsize=256)
def _row_coefficients(start: int, count: int, device: torch.device) -> Tensor:
    """Return a(start .. start + count), [count] int64, all odd."""
    return _splitmix64(torch.arange(start, start + count, device=device), 0x5EED) | 1


@lru_cache(maxsize=64)
def _column_digits(start: int, count: int, device: torch.device) -> Tensor:
    """Return the digits of b(start .. start + count) to base 256, [count, 8] int8 from -64 to 63, the first one odd.

    Half of the int8 range, so that instructions that add two products into 16 bits do not saturate.
    """
    mixed = _splitmix64(torch.arange(start, start + count, device=device), 0xB17E)
    digits = (mixed[:, None] >> _shifts(device)) & 127
    digits[:, 0] |= 1
    return (digits - 64).to(torch.int8)


@lru_cache(maxsize=64)
def _column_coefficients(start: int, count: int, device: torch.device) -> Tensor:
    """Return b(start .. start + count), [count] int64, all odd."""
    return (_column_digits(start, count, device).long() << _shifts(device)).sum(1)
