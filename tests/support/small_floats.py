"""FP8 and FP4 from their bit patterns, by the published definitions in float64: independent of the code under test."""

from __future__ import annotations

import math


def value_of(bits: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """The value of a bit pattern without a sign, by the formula of IEEE 754 and the OCP specifications."""
    exponent, mantissa = bits >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


# magnitudes by ascending code, as far as they are finite
E4M3_VALUES = [value_of(bits, 4, 3, 7) for bits in range(0x7F)]  # 0x7F is NaN
E5M2_VALUES = [value_of(bits, 5, 2, 15) for bits in range(0x7C)]  # 0x7C is infinity
E2M1_BY_BITS = [value_of(bits, 2, 1, 1) for bits in range(8)]

TABLES = {"e4m3": E4M3_VALUES, "e5m2": E5M2_VALUES, "e2m1": E2M1_BY_BITS}


def nearest(value: float, table: list[float]) -> float:
    """Round to nearest, ties to the even code, saturating."""
    magnitude = min(abs(value), table[-1])
    best = min(range(len(table)), key=lambda code: (abs(table[code] - magnitude), code % 2))
    return math.copysign(table[best], value)
