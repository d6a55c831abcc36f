"""Text that a model, a user's code or a file wrote, made safe for a terminal and a line of a log, and commands without secrets."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence

REDACTED = "<redacted>"
SECRET = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.IGNORECASE)

# Escape sequences move the cursor, set the title or the clipboard; bidirectional marks reorder what is read.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def make_printable(text: str, limit: int | None = None) -> str:
    """Return the text with control characters and lone surrogates written as escapes, cut to ``limit`` characters."""
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}... ({len(text):,} characters)"
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command without the values of environment variables (``env_vars``) whose names say that they are secret."""
    split = [argument.partition("=") for argument in arguments]
    return [
        f"{key}={REDACTED}" if "env_vars" in key and (SECRET.search(key) or SECRET.search(value)) else f"{key}{equals}{value}"
        for key, equals, value in split
    ]


def describe_command() -> str:
    """Return the command of this process as it was typed, without secrets."""
    program, *arguments = sys.argv or [""]
    typed = ["python", "-m", "strop"] if program.endswith("strop/__main__.py") else [program]
    return shlex.join([*typed, *redact_arguments(arguments)])
