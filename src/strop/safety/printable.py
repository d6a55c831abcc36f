"""Makes text from a model, user code or a file safe for terminals, pages and log lines.

A terminal obeys control sequences, and terminals and browsers reorder text around bidirectional controls. Such characters are shown by
their codes instead: ``\\x1b``, ``\\u202e``.
"""

from __future__ import annotations

import re
import unicodedata

_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, formats, surrogates, line and paragraph separators
_HARMLESS = "\n\t\u200c\u200d"  # the joiners are part of emoji and of several scripts
_SUSPECT = re.compile(r"[^\n\t -~]")


def make_printable(text: str) -> str:
    """Return the text with all characters that control its display written as escape sequences."""
    return _SUSPECT.sub(lambda match: _show(match[0]), text)


def _show(character: str) -> str:
    if character in _HARMLESS or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")


def shorten(text: str, limit: int, around: str = " ") -> str:
    """Return the beginning and end of a text longer than ``limit``, and the length of the omitted part."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}{around}[... {len(text) - 2 * half:,} characters ...]{around}{text[-half:]}"
