"""Texts without what does not make them others."""

from __future__ import annotations

import re

_MARKS = re.compile(r"[.,;:!?\"'`]+(?=\s|$)")


def fold_text(text: str) -> str:
    """Return a text without case, white space at its ends and more than one space in a row, and marks at the ends of words."""
    return " ".join(_MARKS.sub(" ", text).casefold().split())
