"""End vLLM's processes with the run: when the process that started them is killed, they would otherwise run on and keep their memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

from strop.weights.control import alive

DRIVER = "STROP_DRIVER"  # environment variable: pid of the process that started the engine
PERIOD = 1.0  # seconds between checks


def end_with_driver() -> None:
    """Watch the driver from a thread of a worker process. When it ends, end this process and, if it is a separate one, the engine core."""
    if driver := os.environ.get(DRIVER):
        threading.Thread(target=_watch, args=(int(driver), os.getppid()), name="strop-guardian", daemon=True).start()


def _watch(driver: int, parent: int) -> None:
    while alive(driver):
        time.sleep(PERIOD)
    if parent not in (driver, 1):
        with suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
    os._exit(1)
