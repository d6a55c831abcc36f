"""The pipes of one command: its input, and its output up to a limit, on this process's event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Literal

from strop.extensions.sandboxes.base import OnOutput

_PART = 1 << 16
Name = Literal["stdout", "stderr"]


class Streams:
    """Feeds ``stdin`` to a command and keeps what it writes. ``theirs`` are the descriptors for the command, until ``started``."""

    def __init__(self, stdin: bytes, limit: int, on_output: OnOutput | None, *, reads_output: bool = True) -> None:
        self._loop, self._limit, self._on_output = asyncio.get_running_loop(), limit, on_output
        self._stdin = memoryview(stdin)
        self.over = False  # it wrote more than its limit
        self._kill: Callable[[], None] = lambda: None
        self._kept: dict[Name, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._reading: dict[Name, int] = {}
        reading, self._writing = os.pipe()
        self.theirs = [reading]
        names: tuple[Name, ...] = ("stdout", "stderr") if reads_output else ()
        for name in names:
            self._reading[name], writing = os.pipe()
            self.theirs.append(writing)

    def started(self, kill: Callable[[], None]) -> None:
        """The command has its ends of the pipes. ``kill`` ends it."""
        self._kill = kill
        self._close_theirs()
        os.set_blocking(self._writing, False)
        self._loop.add_writer(self._writing, self._write)
        for name, descriptor in self._reading.items():
            os.set_blocking(descriptor, False)
            self._loop.add_reader(descriptor, self._read, name, descriptor)

    def _close_theirs(self) -> None:
        while self.theirs:
            os.close(self.theirs.pop())

    def _write(self) -> None:
        try:
            if self._stdin:
                self._stdin = self._stdin[os.write(self._writing, self._stdin[: 1 << 20]) :]
            if self._stdin:
                return
        except BlockingIOError:
            return
        except OSError:  # the command reads no more
            pass
        self._close_writing()

    def _close_writing(self) -> None:
        if self._writing >= 0:
            self._loop.remove_writer(self._writing)
            os.close(self._writing)
            self._writing = -1

    def _read(self, name: Name, descriptor: int) -> bool:
        """Read what there is. Return whether there may be more."""
        try:
            part = os.read(descriptor, _PART)
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        if not part:
            self._loop.remove_reader(descriptor)
            return False
        left = self._limit - sum(map(len, self._kept.values()))
        if len(part) > left and not self.over:
            self.over = True
            self._kill()
        if part := part[: max(0, left)]:
            self._kept[name] += part
            if self._on_output is not None:
                self._on_output(name, part)
        return True

    def close(self) -> dict[str, bytes]:
        """Read what is left in the pipes, which processes in the background may keep open, and close them. Return the output."""
        self._close_theirs()
        self._close_writing()
        for name, descriptor in self._reading.items():
            os.set_blocking(descriptor, False)
            for _ in range(64):  # a pipe holds at most 1 MB; one that something still fills is left
                if not self._read(name, descriptor):
                    break
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._reading = {}
        return {name: bytes(text) for name, text in self._kept.items()}


def collect(descriptor: int, file: IO[bytes]) -> None:
    """Copy a pipe into a file until its other ends are closed. Blocks."""
    with suppress(OSError), open(descriptor, "rb", buffering=0) as source:
        while part := source.read(1 << 20):
            file.write(part)
