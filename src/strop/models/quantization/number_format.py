"""Formats of whole tensors: low-precision elements, and scales shared by blocks of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

E8M0_SMALLEST, E8M0_LARGEST = -127, 127  # exponents; the byte is the exponent + 127, and 255 is NaN
FLOAT32_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Element:
    """A floating-point format of 8 bits or fewer, for the elements of a quantised tensor."""

    name: str
    largest: float  # largest finite value; larger ones saturate to it
    dtype: torch.dtype | None  # torch dtype; None: there is none, and codes are uint8

    @property
    def largest_exponent(self) -> int:
        """The exponent of the greatest finite value: floor(log2(largest)), ``emax`` in the MX specification."""
        return math.frexp(self.largest)[1] - 1

    def encode(self, values: Tensor) -> Tensor:
        """Round float32 ``values`` to the nearest, ties to even, saturating. Returns ``dtype``, or codes [...] uint8 of E2M1.

        NaN stays NaN in formats that have it; E2M1 has none, and gives 0, but its block's scale is NaN then.
        """
        saturated = values.clamp(-self.largest, self.largest)  # torch casts values that are too large to NaN
        return _encode_e2m1(saturated) if self.dtype is None else saturated.to(self.dtype)

    def decode(self, encoded: Tensor) -> Tensor:
        """Return the values [...] float32 of the result of ``encode``."""
        return _decode_e2m1(encoded) if self.dtype is None else encoded.float()

    def round(self, values: Tensor) -> Tensor:
        """Return float32 ``values`` rounded to this format, [...] float32."""
        return self.decode(self.encode(values))


E4M3 = Element("e4m3", 448.0, torch.float8_e4m3fn)
E5M2 = Element("e5m2", 57344.0, torch.float8_e5m2)
E2M1 = Element("e2m1", 6.0, None)

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 .. 7; 8 .. 15 are their negatives


def _e2m1_bounds() -> tuple[float, ...]:
    """Return the smallest float32 that rounds to each code from 1 on: ties go to the even code."""
    bounds = []
    for code in range(len(E2M1_VALUES) - 1):
        middle = torch.tensor((E2M1_VALUES[code] + E2M1_VALUES[code + 1]) / 2)
        bounds.append(float(middle if code % 2 else torch.nextafter(middle, torch.tensor(math.inf))))
    return tuple(bounds)


_BOUNDS = _e2m1_bounds()


def _encode_e2m1(values: Tensor) -> Tensor:
    bounds = torch.tensor(_BOUNDS, device=values.device)
    codes = torch.bucketize(values.abs().nan_to_num(0.0), bounds, right=True)
    return torch.where(values.signbit(), codes + 8, codes).to(torch.uint8)


def _decode_e2m1(codes: Tensor) -> Tensor:
    table = torch.tensor((*E2M1_VALUES, *(-value for value in E2M1_VALUES)), device=codes.device)
    return table[codes.int()]


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2 to the power of integer ``exponents`` in the range of E8M0, [...] float32: clamped to 2^-127 .. 2^127."""
    clamped = exponents.clamp(E8M0_SMALLEST, E8M0_LARGEST)
    return torch.ldexp(torch.ones_like(clamped, dtype=torch.float32), clamped)


def encode_e8m0(scales: Tensor) -> Tensor:
    """Return the bytes [...] uint8 of powers of two in float32: the exponent + 127, and 255 for NaN."""
    exponents = torch.frexp(scales.nan_to_num(1.0)).exponent - 1 - E8M0_SMALLEST
    return torch.where(scales.isnan(), 255, exponents).to(torch.uint8)


ScaleKind = Literal["float32", "power_of_two", "power_of_two_floor", "e4m3"]
"""Storage format of a block's scale.

- ``float32``: amax / largest, unrounded (DeepSeek-V3, arXiv 2412.19437, section 3.3).
- ``power_of_two``: the smallest power of two (E8M0) with which nothing saturates (arXiv 2506.08027, and the scales of NVIDIA's kernels).
- ``power_of_two_floor``: 2^(floor(log2(amax)) - emax), the conversion of the MX specification 1.0, section 6.3, where the
  largest values of a block may saturate.
- ``e4m3``: amax / largest in E4M3, over one float32 scale of the tensor, amax / (largest x 448) (NVFP4, arXiv 2509.25149, appendix).
"""

E4M3_SMALLEST = 2.0**-9  # smallest positive value: a scale of 0 would lose its whole block


@dataclass(frozen=True)
class NumberFormat:
    """Low-precision elements in blocks (over the last two dimensions) that share a scale."""

    name: str
    element: Element
    rows: int | None  # rows of a block; None: all
    columns: int | None  # columns of a block; None: all
    scale: ScaleKind = "float32"

    @property
    def bits(self) -> float:
        """Stored bits per value, including its share of the scales of a large tensor."""
        width = 4 if self.element is E2M1 else 8
        if self.rows is None or self.columns is None:
            return width
        return width + (32 if self.scale == "float32" else 8) / (self.rows * self.columns)

    @property
    def one_scale(self) -> bool:
        """Whether a whole matrix has one scale."""
        return self.rows is None and self.columns is None


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor as stored in a format: its value is ``values x scales x tensor_scale``."""

    format: NumberFormat
    values: Tensor  # [..., R, C] of the element's data type; codes of uint8 for E2M1
    scales: Tensor  # [..., row blocks, column blocks] float32: decoded, exactly as stored in the format
    tensor_scale: Tensor  # [..., 1, 1] float32; 1 if the format has none

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [..., R, C] in ``dtype``: multiplied in float32, rounded once."""
        blocks = _split(self.format.element.decode(self.values), self.format)
        return _join(blocks * _combined(self.scales, self.tensor_scale), self.values.shape).to(dtype)


def quantize(tensor: Tensor, number_format: NumberFormat, *, amax: Tensor | None = None) -> QuantizedTensor:
    """Quantise a tensor, matrix by matrix: leading dimensions (experts) are independent.

    Args:
        tensor: [..., R, C] of a floating-point type; a vector [C] is one row.
        number_format: What to store it in.
        amax: The greatest magnitude, [] or [..., 1, 1], for formats with a scale of the whole matrix (one scale, or NVFP4); None: that of
            ``tensor``. A calibrated one makes the scale static: larger values saturate.

    A block that contains an infinity or a NaN has the scale NaN, so that all of it dequantises to NaN and the fault stays
    visible. A block of zeros stays zero. Scales are computed in float32, and values are divided by their scale.
    """
    blocks = _split(tensor.detach().float(), number_format)
    scales, tensor_scale = _choose_scales(blocks, number_format, amax)
    values = number_format.element.encode(blocks / _combined(scales, tensor_scale))
    return QuantizedTensor(number_format, _join(values, tensor.shape), scales, tensor_scale)


def round_trip(tensor: Tensor, number_format: NumberFormat, *, amax: Tensor | None = None) -> Tensor:
    """Return ``tensor`` rounded to the format and back, in its own shape and data type, detached."""
    return quantize(tensor, number_format, amax=amax).dequantize(tensor.dtype)


def _split(tensor: Tensor, number_format: NumberFormat) -> Tensor:
    """[..., R, C] -> [..., row blocks, rows, column blocks, columns], padded with zeros to whole blocks."""
    matrix = tensor[None] if tensor.dim() < 2 else tensor
    matrix = matrix[None] if tensor.dim() == 0 else matrix
    height, width = matrix.shape[-2:]
    rows, columns = number_format.rows or max(1, height), number_format.columns or max(1, width)
    padded = F.pad(matrix.float(), (0, -width % columns, 0, -height % rows)) if width % columns or height % rows else matrix
    blocks: Tensor = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    return blocks


def _join(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Undo ``_split``."""
    matrix = blocks.flatten(-2).flatten(-3, -2)
    if len(shape) < 2:
        return matrix.reshape(-1)[: shape.numel()].reshape(shape)
    return matrix[..., : shape[-2], : shape[-1]].contiguous()


def _combined(scales: Tensor, tensor_scale: Tensor) -> Tensor:
    """[..., row blocks, column blocks] -> the factor of each block, [..., row blocks, 1, column blocks, 1]."""
    return (scales * tensor_scale)[..., :, None, :, None]


def _choose_scales(blocks: Tensor, number_format: NumberFormat, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the scales of blocks [..., row blocks, column blocks], and the scale of the tensor [..., 1, 1]; both float32."""
    if blocks.numel() == 0:
        found = blocks.new_ones((*blocks.shape[:-3], blocks.shape[-2]))
        return found, blocks.new_ones(())
    found = blocks.abs().amax((-3, -1))
    broken = ~found.isfinite()
    if amax is not None and number_format.one_scale:
        found = amax.float().expand_as(found)
    found = torch.where(broken, torch.nan, found)
    largest = number_format.element.largest
    if number_format.scale == "e4m3":
        return _two_level_scales(found, largest, amax)
    one = torch.ones_like(found[..., :1, :1])
    if number_format.scale == "float32":
        return torch.where(found == 0, 1.0, (found / largest).clamp(min=FLOAT32_SMALLEST_NORMAL)), one
    return _power_of_two_scales(found, number_format), one


def _power_of_two_scales(found: Tensor, number_format: NumberFormat) -> Tensor:
    mantissa, exponent = torch.frexp(found.nan_to_num(1.0))  # mantissa from 0.5 to 1
    if number_format.scale == "power_of_two_floor":
        exponent = exponent - 1 - number_format.element.largest_exponent
    else:
        limit, power = math.frexp(number_format.element.largest)
        exponent = exponent - power + (mantissa > limit).int()
    # Zeros: 2^-126 rather than the smallest scale 2^-127 (byte 0), which some kernels reject.
    scales = power_of_two(torch.where(found == 0, -126, exponent))
    return torch.where(found.isnan(), torch.nan, scales)


def _two_level_scales(found: Tensor, largest: float, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    whole = found.nan_to_num(0.0).amax((-2, -1), keepdim=True) if amax is None else amax.float().expand_as(found[..., :1, :1])
    tensor_scale = (whole / (largest * E4M3.largest)).clamp(min=FLOAT32_SMALLEST_NORMAL)
    tensor_scale = torch.where(whole == 0, 1.0, tensor_scale)
    wanted = found / largest / tensor_scale
    return E4M3.round(wanted.clamp(min=E4M3_SMALLEST)), tensor_scale


FP8_TENSOR = NumberFormat("fp8_tensor", E4M3, None, None)
FP8_ROW = NumberFormat("fp8_row", E4M3, 1, None)
FP8_BLOCK = NumberFormat("fp8_block", E4M3, 128, 128)
FP8_BLOCK_POW2 = NumberFormat("fp8_block_pow2", E4M3, 128, 128, "power_of_two")
FP8_GROUP = NumberFormat("fp8_group", E4M3, 1, 128)
FP8_GROUP_POW2 = NumberFormat("fp8_group_pow2", E4M3, 1, 128, "power_of_two")
FP8_E5M2_TENSOR = NumberFormat("fp8_e5m2_tensor", E5M2, None, None)
FP8_E5M2_ROW = NumberFormat("fp8_e5m2_row", E5M2, 1, None)
MXFP8 = NumberFormat("mxfp8", E4M3, 1, 32, "power_of_two")
MXFP8_FLOOR = NumberFormat("mxfp8_floor", E4M3, 1, 32, "power_of_two_floor")
MXFP4 = NumberFormat("mxfp4", E2M1, 1, 32, "power_of_two_floor")
NVFP4 = NumberFormat("nvfp4", E2M1, 1, 16, "e4m3")

NUMBER_FORMATS = {
    each.name: each
    for each in (
        FP8_TENSOR,
        FP8_ROW,
        FP8_BLOCK,
        FP8_BLOCK_POW2,
        FP8_GROUP,
        FP8_GROUP_POW2,
        FP8_E5M2_TENSOR,
        FP8_E5M2_ROW,
        MXFP8,
        MXFP8_FLOOR,
        MXFP4,
        NVFP4,
    )
}
