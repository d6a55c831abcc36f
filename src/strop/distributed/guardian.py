"""End a Ray cluster that was started by a run, together with the run.

Ray's servers end with the process that started them, but its agents then try for a minute to reach a server that no longer
exists. A small watcher process waits until the driver ends for any reason, and kills the rest: every process with the cluster's
mark in its environment. Linux only; on other systems it does nothing.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARK_VARIABLE = "STROP_CLUSTER"  # environment variable
KEEP_ENVIRONMENT = "SPT_NOENV"  # keeps setproctitle, which Ray's processes use, from overwriting the environment


class Guardian:
    """Starts the watcher process, which reads from a pipe that closes when the driver ends."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(16)
        command = [sys.executable, "-I", "-S", __file__, self.mark]
        self._process = (
            subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) if Path("/proc").is_dir() else None
        )

    @contextmanager
    def mark_children(self) -> Iterator[None]:
        """Mark the processes started inside the context, and their descendants, as belonging to the cluster."""
        changes = {MARK_VARIABLE: self.mark, KEEP_ENVIRONMENT: "1"}
        previous = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            for name, value in previous.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def close(self) -> None:
        """Let the watcher kill the marked processes. Return when it has done so."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


def kill_marked(mark: str) -> None:
    """Kill all processes with this mark. Repeat until none is left, to find those that were just being started."""
    marker = f"{MARK_VARIABLE}={mark}".encode()
    while processes := [process for process in _list_processes() if marker in _read_environment(process).split(b"\0")]:
        for process in processes:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)


def _list_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read_environment(process: int) -> bytes:
    """Return the environment that a process was started with; empty if it has ended or belongs to another user."""
    try:
        return Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.read()
    kill_marked(sys.argv[1])
