"""Long text, cut in the middle."""

from __future__ import annotations


def shorten_middle(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of a text, with a note in the middle about how many are missing."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    return f"{text[:head]}\n... ({len(text) - limit} characters left out) ...\n{text[len(text) - tail :]}"
