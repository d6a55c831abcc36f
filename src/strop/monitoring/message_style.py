"""One style for all warnings on standard error: ``warning: ...``, and ``warning (torch): ...`` for those of other packages.

Covers Python's ``warnings`` and the loggers of Strop and of other packages, whose messages are shown once.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import warnings
from contextlib import suppress
from pathlib import Path


class MessageHandler(logging.Handler):
    """Writes log records to the current ``sys.stderr``, so that a live console scrolls them above its panel."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[tuple[str, str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            origin = record.name.partition(".")[0]
            message = self.format(record)
            if origin != "strop" and (origin, message) in self._shown:
                return
            self._shown.add((origin, message))
            level = "error" if record.levelno >= logging.ERROR else "warning" if record.levelno >= logging.WARNING else "debug"
            _write(level, origin, message)
        except Exception:
            self.handleError(record)


def show_warning(message: Warning | str, category: type[Warning], filename: str, *_: object) -> None:
    """Show a warning of Python's ``warnings`` module."""
    _write("warning", _find_package(filename), str(message))


def configure_messages() -> None:
    """Show all warnings in one style. With STROP_LOG=debug, also show Strop's debug messages."""
    warnings.showwarning = show_warning  # type: ignore[assignment]
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[MessageHandler()])
    logging.getLogger("strop").setLevel(logging.DEBUG if os.environ.get("STROP_LOG", "").lower() == "debug" else logging.NOTSET)


def reader_is_gone() -> bool:
    """Return whether standard output is a pipe without a reader, as after ``strop ... | head``."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):
        return False
    return any(events & select.POLLERR for _, events in poll.poll(0))


def discard_output() -> None:
    """Discard standard output, including buffered text, which would raise an error when Python exits."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(level: str, origin: str, message: str) -> None:
    of = "" if origin in ("strop", "") else f" ({origin})"
    sys.stderr.write(f"{level}{of}: {message}\n")
    sys.stderr.flush()


def _find_package(filename: str) -> str:
    """Return the installed package that a file belongs to; empty for Strop's files and the user's own."""
    parts = Path(filename).parts
    return parts[parts.index("site-packages") + 1].removesuffix(".py") if "site-packages" in parts[:-1] else ""
