"""The one error of this package, and the phrase every error of a misspelled name ends with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """Data that cannot be used: the message says what was found, where, and what to set instead."""


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean X? ' when a known name is close, then the names there are."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return (f"; did you mean {close[0]!r}?" if close else ";") + f" there are: {', '.join(names) or 'none'}"
