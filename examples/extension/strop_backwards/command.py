"""``strop backwards WORD``."""

from __future__ import annotations

from collections.abc import Sequence

from strop.cli.commands import Command


def backwards(arguments: Sequence[str], command: str) -> int:
    """Print the words backwards. ``command``: the whole command line."""
    print(" ".join(word[::-1] for word in arguments))
    return 0


BACKWARDS = Command(backwards, "spell words backwards")
