"""Quantised matrices as bytes, half the size of bfloat16: the form in which a publish sends weights that engines hold in FP8."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from strop.models.quantization.number_format import NumberFormat, QuantizedTensor

_DIMENSIONS = 3  # at most experts, rows, columns
_HEADER = 8 * (1 + _DIMENSIONS)  # bytes: the number of dimensions, and their sizes


def packed_size(shape: Sequence[int], number_format: NumberFormat) -> int:
    """Return the packed size in bytes of a matrix, or of experts' matrices, of this shape [..., R, C] in a format with one-byte
    values.
    """
    return _HEADER + 4 * math.prod(_scales_shape(shape, number_format)) + math.prod(shape)


def pack(stored: QuantizedTensor) -> Tensor:
    """Return the header, the scales and the values, [bytes] uint8."""
    shape = list(stored.shape)
    header = torch.tensor([len(shape), *shape, *[1] * (_DIMENSIONS - len(shape))], device=stored.values.device)
    parts = (header, stored.scales.float(), stored.values)
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def unpack(packed: Tensor, number_format: NumberFormat) -> QuantizedTensor:
    """Return the argument of ``pack``, as views of ``packed``. Raises ValueError for bytes of another format or size."""
    count, *sizes = packed[:_HEADER].view(torch.int64).tolist()
    shape = sizes[:count]
    if packed.numel() != packed_size(shape, number_format):
        raise ValueError(
            f"{packed.numel()} bytes arrived for a matrix {tuple(shape)} in {number_format.name}: the engine has another format"
        )
    scales_shape = _scales_shape(shape, number_format)
    end = _HEADER + 4 * math.prod(scales_shape)
    scales = packed[_HEADER:end].view(torch.float32).view(scales_shape)
    values = packed[end:].view(number_format.element.dtype or torch.uint8).view(shape)
    one = torch.ones([*shape[:-2], 1, 1], device=packed.device)
    return QuantizedTensor(number_format, values, scales, one)


def _scales_shape(shape: Sequence[int], number_format: NumberFormat) -> list[int]:
    *leading, rows, columns = shape
    return [*leading, -(-rows // (number_format.rows or rows)), -(-columns // (number_format.columns or columns))]
