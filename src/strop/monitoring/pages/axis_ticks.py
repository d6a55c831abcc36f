"""The range of an axis and round numbers on it."""

from __future__ import annotations

import math
from collections.abc import Sequence


def make_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers from ``low`` to ``high``, at most ``most`` of them and at least one."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    for factor in (1, 2, 5, 10, 20, 50):
        step = power * factor
        first = math.ceil(low / step - 1e-9)
        last = math.floor((high + 1e-9 * span) / step)
        if last - first < most:
            return [step * number for number in range(first, last + 1)] or [low]
    return [low]


def find_range(
    values: Sequence[float], *, span: float = 0.0, share: bool = False, from_zero: bool = False
) -> tuple[float, float]:
    """Return the ends of an axis: 0 to 1 for a share, else at least ``span`` wide, and not below 0 where no value is."""
    if share:
        return 0.0, 1.0
    low, high = min(values), max(values)
    margin = max((high - low) * 0.06, (span - (high - low)) / 2, abs(high) * 1e-6, 1e-12)
    wide_low, wide_high = low - margin, high + margin
    if low >= 0 and (wide_low < 0 or from_zero):
        wide_low = 0.0
    return wide_low, wide_high


def format_tick(value: float) -> str:
    """Return a short number: 0.25, 12, 3e-05."""
    size = abs(value)
    return (
        "0"
        if size < 1e-12
        else f"{value:.0e}"
        if size < 1e-3 or size >= 1e6
        else f"{value:,.6g}"
        if size < 1000
        else f"{value:,.0f}"
    )
