"""Text that a model, a user's code or a file wrote, made safe for a terminal, a page and a line of a log.

A terminal obeys control sequences, and terminals and browsers reorder text around bidirectional controls. Such characters are shown by
their codes instead: ``\\x1b``, ``\\u202e``.
"""

from __future__ import annotations

import re
import unicodedata

_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, formats, surrogates, separators of lines and paragraphs
_HARMLESS = "\n\t\u200c\u200d"  # the joiners are part of emoji and of several scripts
_SUSPECT = re.compile(r"[^\n\t -~]")


def make_printable(text: str) -> str:
    """Return the text with every character that controls how it is shown written as an escape sequence."""
    return _SUSPECT.sub(lambda match: _show(match[0]), text)


def _show(character: str) -> str:
    if character in _HARMLESS or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")


def shorten(text: str, limit: int, around: str = " ") -> str:
    """Return the beginning and the end of a text that is longer than ``limit``, and how much is left out between them."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}{around}[... {len(text) - 2 * half:,} characters ...]{around}{text[-half:]}"
