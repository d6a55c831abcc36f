"""What the view cannot answer, as a sentence for the reader."""

from __future__ import annotations

import math
from typing import Any


class ViewError(Exception):
    """A request that cannot be answered. The message is shown on the page."""

    def __init__(self, message: str, status: int = 404) -> None:
        super().__init__(message)
        self.status = status


def clean_number(value: Any) -> float | None:
    """Return a finite number, or None: JSON has no others."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None
