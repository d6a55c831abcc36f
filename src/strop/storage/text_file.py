"""The user's text files: UTF-8, with or without a byte order mark."""

from __future__ import annotations

import codecs
from pathlib import Path

_OTHER_MARKS = {"UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)}


class NotUtf8(ValueError):
    """A file is text in another encoding, or no text. The message names the file and the line."""


def read_text_file(path: Path | str) -> str:
    """Return the text of a file, without a byte order mark. Raises OSError, NotUtf8."""
    path = Path(path).expanduser()
    return decode_text(path.read_bytes(), path)


def decode_text(content: bytes, path: Path | str) -> str:
    """Return text without a byte order mark. Raises NotUtf8."""
    for name, marks in _OTHER_MARKS.items():
        if content.startswith(marks):
            raise NotUtf8(f"{path} is {name} text; save it as UTF-8")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise NotUtf8(
            f"{path}:{line} is not UTF-8 text (the byte 0x{content[error.start]:02x}, perhaps of Latin-1 or Windows-1252); save it as UTF-8"
        ) from error
