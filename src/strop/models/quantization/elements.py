"""Small floating-point formats: E4M3 and E5M2 of FP8, E2M1 of FP4, and E8M0, the powers of two used as scales.

E4M3 and E5M2 are those of arXiv 2209.05433 (E4M3 without infinities, ``torch.float8_e4m3fn``); E2M1 and E8M0 those of the OCP
Microscaling Formats (MX) specification 1.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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
