"""Normalise texts, so that equal ones compare equal."""

from __future__ import annotations

import re

_MARKS = re.compile(r"[.,;:!?\"'`]+(?=\s|$)")


def fold_text(text: str) -> str:
    """Return a text in lower case, with single spaces, without white space at its ends and punctuation at word ends."""
    return " ".join(_MARKS.sub(" ", text).casefold().split())
