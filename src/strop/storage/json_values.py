"""Convert values to JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def clean_json(value: Any) -> Any:
    """Return nested values with None for numbers that are not finite, and lists for tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): clean_json(item) for name, item in value.items()}
    return [clean_json(item) for item in value] if isinstance(value, list | tuple) else value
