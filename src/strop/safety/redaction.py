"""Commands and settings without the secrets in them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence

REDACTED = "<redacted>"
SECRET = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.IGNORECASE)


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
    if typed[0].endswith(".py"):
        typed = ["python", program]
    return shlex.join([*typed, *redact_arguments(arguments)])
