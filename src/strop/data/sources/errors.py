"""The error of this package, and suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """Invalid data. The message says what was found, where, and what to set instead."""


def suggest_names(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'X'?" if a known name is close, and a list of the known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return (f"; did you mean {close[0]!r}?" if close else ";") + f" there are: {', '.join(names) or 'none'}"
