"""The process of SGLang's server: ``python -m strop.extensions.sglang.server.server_entry``, with its options as JSON on standard input.

It runs under the interpreter that has SGLang, which need not be the run's. Processes that SGLang starts import this module again before
anything else, so what is done at import holds for them too.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from strop.extensions.sglang.server.cpu_stub import install_cpu_stub
from strop.generation.vllm.launch import DRIVER_PID_VARIABLE, DRIVER_POLL_SECONDS
from strop.weight_sync.transports.connection import is_process_alive

REFUSED_STATUS = 3  # exit status when the options are refused; the message is the last line of the output
REFUSED_PREFIX = "strop refuses: "

install_cpu_stub()


def main() -> None:
    options = json.load(sys.stdin)
    _end_group_with_driver()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    from strop.extensions.sglang.server.scheduler_process import run_scheduler, use_prepared_images

    use_prepared_images()

    _check_names(options["arguments"], list(inspect.signature(ServerArgs).parameters))
    arguments = ServerArgs(**options["arguments"])
    arguments.resolve_once()
    launch_server(arguments, run_scheduler_process_func=run_scheduler)


def _check_names(arguments: Mapping[str, Any], known: list[str]) -> None:
    """Exit with a message for the first argument that this version of SGLang does not have."""
    from sglang.version import __version__

    for name in arguments:
        if name not in known:
            matches = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {matches[0]}?" if matches else ""
            key = f"policy.generation.sglang_kwargs.{name}"
            sys.stdout.write(f"{REFUSED_PREFIX}{key}: the installed SGLang ({__version__}) has no such argument{meant}\n")
            sys.exit(REFUSED_STATUS)


def _end_group_with_driver() -> None:
    """End all processes of the server when the driver's has ended, however it ended."""
    if driver := os.environ.get(DRIVER_PID_VARIABLE):
        threading.Thread(target=_watch, args=(int(driver),), name="strop-guardian", daemon=True).start()


def _watch(driver: int) -> None:
    while is_process_alive(driver):
        time.sleep(DRIVER_POLL_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
