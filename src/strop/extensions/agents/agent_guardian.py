"""Terminate agent commands together with the run, even if the run itself is killed.

Each command leads its own process group, so that all its child processes can be terminated and signals to the run do not reach
it. Groups are registered with a small watcher process; its pipe closes when the run ends for any reason, and it then kills the
remaining groups.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

_lock = threading.Lock()
_watchers: dict[int, subprocess.Popen[bytes]] = {}  # keyed by the pid of the starting process, because a fork needs its own


@contextmanager
def guard_group(group: int) -> Iterator[None]:
    """Ensure that a process group is killed if this process ends inside the context."""
    _tell(b"+%d\n" % group)
    try:
        yield
    finally:
        _tell(b"-%d\n" % group)


def _tell(line: bytes) -> None:
    with _lock, suppress(BrokenPipeError):
        watcher = _watchers.get(os.getpid())
        if watcher is None:
            command = [sys.executable, "-I", "-S", __file__]
            watcher = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
            _watchers[os.getpid()] = watcher
        assert watcher.stdin is not None
        watcher.stdin.write(line)


def watch(lines: Iterable[bytes]) -> None:
    """Read the start and end of groups until the input ends, and kill the remaining ones."""
    groups = set[int]()
    for line in lines:
        (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    watch(sys.stdin.buffer)
