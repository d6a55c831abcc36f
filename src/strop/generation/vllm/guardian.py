"""End vLLM's processes with the run: when the process that started them is killed, they would otherwise run on and keep their memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

from strop.weight_sync.transports.control import is_process_alive

DRIVER_PID_VARIABLE = "STROP_DRIVER"  # environment variable: pid of the process that started the engine
DRIVER_POLL_SECONDS = 1.0  # seconds between checks


def exit_with_driver() -> None:
    """Watch the driver from a thread of a worker process. When it ends, end this process and, if it is a separate one, the engine core."""
    if driver := os.environ.get(DRIVER_PID_VARIABLE):
        threading.Thread(target=_watch_driver, args=(int(driver), os.getppid()), name="strop-guardian", daemon=True).start()


def _watch_driver(driver: int, parent: int) -> None:
    while is_process_alive(driver):
        time.sleep(DRIVER_POLL_SECONDS)
    if parent not in (driver, 1):
        with suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
    os._exit(1)
