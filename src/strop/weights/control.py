"""Small messages between the processes of one machine, over a Unix socket.

The socket is also what tells that the other side is gone: when a process ends, however it ends, its end of the connection does. (Unless a
fork of it holds the connection open: so the process itself is looked for too, where the system says which one it is.) On Linux the socket
has no file; elsewhere it lies in a folder that only this user can enter.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from strop.weights.base import TransportError

_PERIOD = 0.5  # seconds between looks at whether a silent process still lives


@dataclass(frozen=True)
class Hello:
    """A receiver's first word."""

    index: int


@dataclass(frozen=True)
class Segment:
    """The memory that buckets will lie in; the transport says what ``handle`` is."""

    size: int
    handle: bytes = b""


@dataclass(frozen=True)
class Begin:
    number: int  # of the publish, from 1: nothing of an older one is taken for it
    digest: str  # of the manifest


@dataclass(frozen=True)
class Ready:
    number: int


@dataclass(frozen=True)
class Filled:
    number: int
    bucket: int
    start: int  # byte of the segment


@dataclass(frozen=True)
class Taken:
    number: int
    bucket: int


@dataclass(frozen=True)
class Abandoned:
    """Whoever says it does not go on with this publish."""

    number: int
    reason: str


Message = Hello | Segment | Begin | Ready | Filled | Taken | Abandoned


class Link:
    """One end of a connection. ``who`` is the other end, as messages call it."""

    def __init__(self, end: socket.socket, who: str, timeout: float) -> None:
        self.pid = _peer(end)[0]
        self.who = f"{who} (process {self.pid})" if self.pid else who
        self.timeout = timeout
        self.connection = Connection(end.detach())

    def send(self, message: Message) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self.gone() from None

    def receive(self, doing: str) -> Message:
        """The next message. Raises TransportError where none comes within the time limit; ``doing`` is what is waited for."""
        until = time.monotonic() + self.timeout
        while not self._poll(min(_PERIOD, max(0.0, until - time.monotonic()))):
            if not alive(self.pid):
                raise self.gone()
            if time.monotonic() >= until:
                raise TransportError(f"{self.who} did not {doing} within {self.timeout:g} s")
        return self.take()

    def take(self) -> Message:
        """A message that has arrived."""
        try:
            message: Message = self.connection.recv()
        except (EOFError, OSError):
            raise self.gone() from None
        return message

    def pending(self) -> bool:
        """Whether a message, or the news of the other side's end, has arrived."""
        return self._poll(0.0)

    def _poll(self, seconds: float) -> bool:
        try:
            return self.connection.poll(seconds)
        except OSError:
            raise self.gone() from None

    def gone(self) -> TransportError:
        return TransportError(f"{self.who} went away: it closed the channel, ended or was killed")

    def close(self) -> None:
        self.connection.close()


class Hub:
    """The sender's end of all connections: receivers come, and come again after they were restarted.

    One thread uses it at a time; another may ``stop`` it, which ends what the first is waiting for.
    """

    def __init__(self, receivers: int, timeout: float) -> None:
        if receivers < 1:
            raise ValueError(f"a channel with {receivers} receivers sends to nobody; there has to be at least one")
        self.receivers, self.timeout = receivers, timeout
        self.links: dict[int, Link] = {}
        self._stopped = threading.Event()
        self._folder, self.path = _place()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen(max(16, 2 * receivers))

    def gather(self) -> None:
        """Have a connection with every receiver. Raises TransportError that names the missing ones."""
        self._forget_the_past()
        until = time.monotonic() + self.timeout
        while True:
            self._refuse_stopped()
            complete, left = len(self.links) == self.receivers, max(0.0, until - time.monotonic())
            if not self._accept(0.0 if complete else min(_PERIOD, left)) and (complete or not left):
                break
        if missing := [index for index in range(self.receivers) if index not in self.links]:
            raise TransportError(f"{_names(missing)} of {self.receivers} did not connect within {self.timeout:g} s")

    def _forget_the_past(self) -> None:
        """Drop the connections of receivers that are gone, and words about earlier publishes."""
        for index, link in list(self.links.items()):
            try:
                while link.pending():
                    link.take()
            except TransportError:
                link.close()
                del self.links[index]

    def _accept(self, seconds: float) -> bool:
        """Take one receiver in; False where none came."""
        self._socket.settimeout(seconds)
        try:
            end, _ = self._socket.accept()
        except (TimeoutError, BlockingIOError):
            return False
        end.setblocking(True)
        if _peer(end)[1] not in (None, os.getuid()):
            end.close()
            return True
        link = Link(end, "a receiver", self.timeout)
        with suppress(TransportError):
            hello = link.receive("say which one it is")
            if isinstance(hello, Hello) and 0 <= hello.index < self.receivers:
                link.who = link.who.replace("a receiver", f"receiver {hello.index}")
                if (before := self.links.pop(hello.index, None)) is not None:
                    before.close()
                self.links[hello.index] = link
        return True

    def tell(self, message: Message) -> None:
        for link in self.links.values():
            link.send(message)

    def hear(self, awaited: Iterable[int], doing: str) -> list[tuple[int, Message]]:
        """Messages of any of these receivers, at least one. Raises TransportError where one is gone, or none says anything in time."""
        links = {index: self.links[index] for index in awaited}
        until = time.monotonic() + self.timeout
        while True:
            self._refuse_stopped()
            arrived = wait([link.connection for link in links.values()], min(_PERIOD, max(0.0, until - time.monotonic())))
            if arrived:
                return [(index, link.take()) for index, link in links.items() if link.connection in arrived]
            for link in links.values():
                if not alive(link.pid):
                    raise link.gone()
            if time.monotonic() >= until:
                raise TransportError(f"{_names(sorted(links))} did not {doing} within {self.timeout:g} s")

    def stop(self) -> None:
        """Whoever waits, in another thread, gets a TransportError soon."""
        self._stopped.set()

    def _refuse_stopped(self) -> None:
        if self._stopped.is_set():
            raise TransportError("the channel was closed")

    def close(self) -> None:
        self.stop()
        for link in self.links.values():
            link.close()
        self.links.clear()
        self._socket.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def reach(path: str, index: int, receivers: int, timeout: float) -> Link:
    """A receiver's connection to the sender. Raises TransportError where there is none, ValueError for an index that it does not expect."""
    if not 0 <= index < receivers:
        raise ValueError(f"receiver {index} of {receivers}: they are counted from 0; make the sender for as many as there are")
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(path)
    except OSError as error:
        end.close()
        raise TransportError(
            f"there is no sender at {path.lstrip(chr(0))!r} on this machine ({error}): it ended or closed"
        ) from None
    if _peer(end)[1] not in (None, os.getuid()):  # the sender ended, and somebody else took its name
        end.close()
        raise TransportError(f"another user's process answers in the sender's place at {path.lstrip(chr(0))!r}")
    link = Link(end, "the sender", timeout)
    link.send(Hello(index))
    return link


def alive(pid: int | None) -> bool:
    """Whether the process runs; True where that cannot be known."""
    if pid is None:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:  # one that was killed stays in the table until its parent asks how it ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return True


def machine() -> str:
    """Where a process's number means the same process: host name, and on Linux this start of the system and the container."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _peer(end: socket.socket) -> tuple[int | None, int | None]:
    """Process and user at the other end, where the system says."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None, None
    pid, user, _group = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid or None, user


def _place() -> tuple[Path | None, str]:
    """A folder to remove in the end, if there is one, and the socket's name."""
    if sys.platform == "linux":
        return None, f"\0strop-weights-{secrets.token_hex(16)}"
    folder = Path(tempfile.mkdtemp(prefix="strop-"))
    return folder, str(folder / "socket")


def _names(indexes: Sequence[int]) -> str:
    return ("receiver " if len(indexes) == 1 else "receivers ") + ", ".join(map(str, indexes))
