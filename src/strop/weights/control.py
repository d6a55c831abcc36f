"""Control messages between processes of one machine, over a Unix socket.

The socket also shows when the other side is gone: its end of the connection closes when its process ends, however it ends. A fork may keep
the connection open, so the process itself is checked too, where the system reports its pid. On Linux the socket has no file; elsewhere it
is in a folder that only this user can access.
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

_PERIOD = 0.5  # seconds between liveness checks of a silent process


@dataclass(frozen=True)
class Hello:
    """A receiver's first message."""

    index: int


@dataclass(frozen=True)
class Segment:
    """The shared memory for buckets; ``handle`` is specific to the transport."""

    size: int
    handle: bytes = b""


@dataclass(frozen=True)
class Begin:
    number: int  # of the publish, from 1; tells its messages from those of older ones
    digest: str  # of the manifest


@dataclass(frozen=True)
class Ready:
    number: int


@dataclass(frozen=True)
class Filled:
    number: int
    bucket: int
    start: int  # byte offset in the segment


@dataclass(frozen=True)
class Taken:
    number: int
    bucket: int


@dataclass(frozen=True)
class Abandoned:
    """The side that sends this message has aborted the publish."""

    number: int
    reason: str


Message = Hello | Segment | Begin | Ready | Filled | Taken | Abandoned


class Link:
    """One end of a connection. ``peer`` is how error messages name the other end."""

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
        """Return the next message. Raises TransportError after the time limit; ``doing`` is what the peer is expected to do."""
        until = time.monotonic() + self.timeout
        while not self._poll(min(_PERIOD, max(0.0, until - time.monotonic()))):
            if not alive(self.pid):
                raise self.gone()
            if time.monotonic() >= until:
                raise TransportError(f"{self.who} did not {doing} within {self.timeout:g} s")
        return self.take()

    def take(self) -> Message:
        """Return a message that has arrived. Raises TransportError if the peer is gone."""
        try:
            message: Message = self.connection.recv()
        except (EOFError, OSError):
            raise self.gone() from None
        return message

    def pending(self) -> bool:
        """Whether a message, or the end of the connection, has arrived."""
        return self._poll(0.0)

    def _poll(self, seconds: float) -> bool:
        try:
            return self.connection.poll(seconds)
        except OSError:
            raise self.gone() from None

    def gone(self) -> TransportError:
        return TransportError(f"{self.who} went away: it closed the channel, exited or was killed")

    def close(self) -> None:
        self.connection.close()


class Hub:
    """The sender's end of all connections. Receivers may reconnect after a restart.

    Only one thread may use it at a time; another may call ``stop``, which ends any wait of the first.
    """

    def __init__(self, receivers: int, timeout: float) -> None:
        if receivers < 1:
            raise ValueError(f"found {receivers} receivers; a sender needs at least one")
        self.receivers, self.timeout = receivers, timeout
        self.links: dict[int, Link] = {}
        self._stopped = threading.Event()
        self._folder, self.path = _place()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen(max(16, 2 * receivers))

    def gather(self) -> None:
        """Wait until every receiver is connected. Raises a TransportError that names the missing ones."""
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
        """Drop the connections of receivers that are gone, and messages about earlier publishes."""
        for index, link in list(self.links.items()):
            try:
                while link.pending():
                    link.take()
            except TransportError:
                link.close()
                del self.links[index]

    def _accept(self, seconds: float) -> bool:
        """Accept one connection. Return False if none arrived in time."""
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
            hello = link.receive("send its index")
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
        """Return at least one message from these receivers. Raises TransportError if one is gone or none sends a message in time."""
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
        """Make a wait in another thread fail with a TransportError."""
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
    """Connect a receiver to the sender. Raises TransportError if there is none, ValueError if ``index`` is out of range."""
    if not 0 <= index < receivers:
        raise ValueError(f"receiver {index} of {receivers}: indices start at 0; create the sender with the number of receivers")
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(path)
    except OSError as error:
        end.close()
        raise TransportError(
            f"there is no sender at {path.lstrip(chr(0))!r} on this machine ({error}): it exited or closed the channel"
        ) from None
    if _peer(end)[1] not in (None, os.getuid()):  # the sender exited, and another user bound the same name
        end.close()
        raise TransportError(f"another user's process answers in the sender's place at {path.lstrip(chr(0))!r}")
    link = Link(end, "the sender", timeout)
    link.send(Hello(index))
    return link


def alive(pid: int | None) -> bool:
    """Whether the process runs; True if that cannot be determined."""
    if pid is None:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:  # a killed process stays in the process table as a zombie until its parent waits for it
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return True


def machine() -> str:
    """Return an id of the pid namespace: host name, and on Linux also boot id and container. Equal pids under it are the same process."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _peer(end: socket.socket) -> tuple[int | None, int | None]:
    """Return (pid, user id) of the process at the other end, None where the system does not report them."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None, None
    pid, user, _group = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid or None, user


def _place() -> tuple[Path | None, str]:
    """Return a new socket address, with the folder to remove at the end, if it has one."""
    if sys.platform == "linux":
        return None, f"\0strop-weights-{secrets.token_hex(16)}"
    folder = Path(tempfile.mkdtemp(prefix="strop-"))
    return folder, str(folder / "socket")


def _names(indexes: Sequence[int]) -> str:
    return ("receiver " if len(indexes) == 1 else "receivers ") + ", ".join(map(str, indexes))
