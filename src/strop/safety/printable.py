"""Makes text from a model, user code or a file safe for terminals, pages and log lines.

A terminal obeys control sequences, and terminals and browsers reorder text around bidirectional controls. Such characters are shown by
their codes instead: ``\\x1b``, ``\\u202e``.

Secrets are removed from commands and settings: every value of an environment variable (``env_vars``), because names do not reliably
reveal secrets, and logins in URLs.
"""

from __future__ import annotations

import re
import shlex
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, cast

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
    return f"{text[:half]}{around}[... {len(text) - 2 * half:,} characters ...]{around}{text[len(text) - half :]}"


REDACTED = "<redacted>"
ENV_VARS = "env_vars"
LOGIN = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*://)[^/\s\"'<>]*@")  # https://user:password@, https://token@


def redact_text(text: str) -> str:
    """Return a text without the user and password of the URLs in it."""
    return LOGIN.sub(rf"\g<scheme>{REDACTED}@", text) if "://" in text else text


def redact_secrets(value: Any, parent: str = "") -> Any:
    """Return nested settings without the values of environment variables and the logins of URLs."""
    if isinstance(value, Mapping):
        return {key: redact_secrets(inner, parent if parent == ENV_VARS else str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact_secrets(inner, parent) for inner in value]
    if parent == ENV_VARS:
        return value if value is None else REDACTED
    return redact_text(value) if isinstance(value, str) else value


def redact_yaml(text: str) -> str:
    """Return a configuration's text without the values of environment variables and the logins of URLs."""
    lines: list[str] = []
    section, names = -1, cast("int | None", None)  # indentation of env_vars and of its names, while inside it
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        key, colon, value = line.partition(":")
        if line.strip() and indent <= section:
            section, names = -1, None
        if section >= 0 and line.strip():
            names = indent if names is None else names
            line = f"{key}: {REDACTED}" if colon and indent == names else f"{' ' * indent}{REDACTED}"
        elif key.strip(" -\"'") == ENV_VARS and value.strip() in ("", "{}", "null"):
            section = indent
        elif ENV_VARS in line:  # in braces, which may span lines
            section, names = indent, -1
            line = f"{line.partition(ENV_VARS)[0]}{ENV_VARS}: {REDACTED}"
        lines.append(redact_text(line))
    return "\n".join(lines)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command without the values of environment variables and the logins of URLs."""
    split = [argument.partition("=") for argument in arguments]
    return [
        f"{key}={REDACTED}" if equals and ENV_VARS in f"{key}{value}" else redact_text(f"{key}{equals}{value}")
        for key, equals, value in split
    ]


def describe_command() -> str:
    """Return the command of this process as typed, without secrets."""
    program, *arguments = sys.argv or [""]
    typed = ["python", "-m", "strop"] if program.endswith("strop/__main__.py") else [program]
    if typed[0].endswith(".py"):
        typed = ["python", program]
    return shlex.join([*typed, *redact_arguments(arguments)])
