"""torch's profiler without the messages its library prints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

LEVEL = "KINETO_LOG_LEVEL"


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep the profiler's library from printing when it starts and stops, unless an environment variable sets its log level."""
    before = os.environ.get(LEVEL)
    os.environ[LEVEL] = before or "6"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(LEVEL, None)
