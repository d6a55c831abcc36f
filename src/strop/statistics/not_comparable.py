"""The error of comparisons."""

from __future__ import annotations


class NotComparable(ValueError):
    """Two evaluations cannot be compared. The message says why, and what to do."""
