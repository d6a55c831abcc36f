"""Whether processes that a test does not own still run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(holds: Callable[[], object], seconds: float = 10.0) -> bool:
    """Wait until something holds. Returns whether it does."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(holds())
