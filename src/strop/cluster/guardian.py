"""A cluster that a run started for itself must not outlive it.

Ray's servers end with the process that started them, but its agents then try for a minute to say so to a server that is gone. So a small
program waits for the end of the driver, however it comes, and ends what is left: every process that was started with the cluster's mark in
its environment. Linux only; elsewhere nothing is done.
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

MARK = "STROP_CLUSTER"  # environment variable
KEEPS_ENVIRONMENT = "SPT_NOENV"  # for setproctitle, by which Ray's processes would otherwise write their names over it


class Guardian:
    """Started with the cluster. It waits at a pipe that nobody writes to, and that closes with the driver."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(16)
        command = [sys.executable, "-I", "-S", __file__, self.mark]
        self._process = (
            subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) if Path("/proc").is_dir() else None
        )

    @contextmanager
    def marking(self) -> Iterator[None]:
        """What is started meanwhile, and what that starts later, is the cluster's."""
        changes = {MARK: self.mark, KEEPS_ENVIRONMENT: "1"}
        before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def close(self) -> None:
        """End what is left; returns when it has been told to."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


def end_marked(mark: str) -> None:
    """Again until there is none: one that was just being started is found at the second look."""
    sought = f"{MARK}={mark}".encode()
    while found := [process for process in _processes() if sought in _environment(process).split(b"\0")]:
        for process in found:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(process: int) -> bytes:
    """That it was started with; nothing of one that has ended, or belongs to somebody else."""
    try:
        return Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.read()
    end_marked(sys.argv[1])
