"""A run's configuration in the form services accept: flat names, and texts of bounded length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield ``grpo.seed``, 42 for every setting that is not null; lists as text."""
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from flatten_settings(value, f"{key}.")
        elif value is not None:
            yield key, value if isinstance(value, bool | int | float | str) else str(value)
