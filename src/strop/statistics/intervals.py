"""How far an estimate may be off."""

from __future__ import annotations

import math
from collections.abc import Sequence


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of independent values, of which there are at least two."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
