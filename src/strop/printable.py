"""Text that a model, a user's code or a file wrote, made safe for a terminal and a line of a log."""

from __future__ import annotations

import re

# Escape sequences move the cursor, set the title or the clipboard; bidirectional marks reorder what is read.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def make_printable(text: str, limit: int | None = None) -> str:
    """Return the text with control characters and lone surrogates written as escapes, cut to ``limit`` characters."""
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}... ({len(text):,} characters)"
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
