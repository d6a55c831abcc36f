"""End the commands of agents together with the run, also where the run itself is killed.

A command leads a process group of its own, so that all it starts can be ended, and a signal to the run does not reach it. A small watcher
process is told of each group; its pipe closes when the run ends, for whatever reason, and it kills the groups that are left.
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
_watchers: dict[int, subprocess.Popen[bytes]] = {}  # by the process that started it: a fork needs its own


@contextmanager
def guard_group(group: int) -> Iterator[None]:
    """Have a process group killed if this process ends inside of the context."""
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
    """Read groups that begin and end, to the end of the lines, and kill those that are left."""
    groups = set[int]()
    for line in lines:
        (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    watch(sys.stdin.buffer)
