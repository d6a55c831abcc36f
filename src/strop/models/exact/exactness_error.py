"""The error of a model or a machine that cannot compute the same bits twice."""

from __future__ import annotations


class NotExactError(ValueError):
    """``policy.exact_on_policy`` cannot hold. The message names the operation, the reason and what to set instead."""
