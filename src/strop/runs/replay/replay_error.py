"""Why a step cannot be replayed."""

from __future__ import annotations


class ReplayError(ValueError):
    """A step cannot be replayed. The message says why, and which steps can."""
