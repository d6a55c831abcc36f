"""An error of a tracker as one line that a user can read."""

from __future__ import annotations

from strop.safety.printable import make_printable

LONGEST = 300  # characters


def describe_error(error: BaseException) -> str:
    """Return ``ConnectionError: the first line of the message``, without further lines (an SQL statement, an HTML page)."""
    lines = [line.strip() for line in make_printable(str(error)).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
