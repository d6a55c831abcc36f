"""Control messages between processes of one machine, over a Unix socket.

The socket also shows when the other side is gone: the kernel closes its end when its process ends, however it ends. A fork may keep the
connection open, so the process itself is checked too, where the system reports its pid. On Linux the socket has no file; elsewhere it
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

from strop.weight_sync.base import TransportError

_POLL_SECONDS = 0.5  # seconds between liveness checks of a silent process


@dataclass(frozen=True)
class ReceiverHello:
    """A receiver's first message."""

    index: int


@dataclass(frozen=True)
class SharedSegment:
    """The shared memory for buckets; ``handle`` is specific to the transport."""

    size: int
    handle: bytes = b""


@dataclass(frozen=True)
class BeginPublish:
    number: int  # of the publish, from 1; distinguishes its messages from those of earlier ones
    digest: str  # of the manifest


@dataclass(frozen=True)
class ReceiverReady:
    number: int


@dataclass(frozen=True)
class BucketFilled:
    number: int
    bucket: int
    start: int  # byte offset in the segment


@dataclass(frozen=True)
class BucketTaken:
    number: int
    bucket: int


@dataclass(frozen=True)
class PublishAbandoned:
    """The side that sends this message has aborted the publish."""

    number: int
    reason: str


Message = ReceiverHello | SharedSegment | BeginPublish | ReceiverReady | BucketFilled | BucketTaken | PublishAbandoned


class ControlConnection:
    """One end of a connection. ``peer`` is how error messages name the other end."""

    def __init__(self, sock: socket.socket, peer: str, timeout: float) -> None:
        self.pid = _peer_credentials(sock)[0]
        self.peer = f"{peer} (process {self.pid})" if self.pid else peer
        self.timeout = timeout
        self.connection = Connection(sock.detach())

    def send(self, message: Message) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self.make_lost_error() from None

    def receive(self, doing: str) -> Message:
        """Return the next message. Raises TransportError after the time limit; ``doing`` is what the peer is expected to do."""
        deadline = time.monotonic() + self.timeout
        while not self._poll(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
            if not is_process_alive(self.pid):
                raise self.make_lost_error()
            if time.monotonic() >= deadline:
                raise TransportError(f"{self.peer} did not {doing} within {self.timeout:g} s")
        return self.read()

    def read(self) -> Message:
        """Return a message that has arrived. Raises TransportError if the peer is gone."""
        try:
            message: Message = self.connection.recv()
        except (EOFError, OSError):
            raise self.make_lost_error() from None
        return message

    def has_message(self) -> bool:
        """Whether a message, or the end of the connection, has arrived."""
        return self._poll(0.0)

    def _poll(self, seconds: float) -> bool:
        try:
            return self.connection.poll(seconds)
        except OSError:
            raise self.make_lost_error() from None

    def make_lost_error(self) -> TransportError:
        return TransportError(f"{self.peer} went away: it closed the channel, exited or was killed")

    def close(self) -> None:
        self.connection.close()


class ControlServer:
    """The sender's end of all connections. Receivers may reconnect after a restart.

    Only one thread may use it at a time; another may call ``stop``, which ends any wait of the first.
    """

    def __init__(self, receivers: int, timeout: float) -> None:
        if receivers < 1:
            raise ValueError(f"found {receivers} receivers; a sender needs at least one")
        self.receivers, self.timeout = receivers, timeout
        self.connections: dict[int, ControlConnection] = {}
        self._stopped = threading.Event()
        self._folder, self.path = _make_socket_address()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen(max(16, 2 * receivers))

    def wait_for_connections(self) -> None:
        """Wait until every receiver is connected. Raises a TransportError that names the missing ones."""
        self._drop_stale()
        deadline = time.monotonic() + self.timeout
        while True:
            self._check_stopped()
            complete, remaining = len(self.connections) == self.receivers, max(0.0, deadline - time.monotonic())
            if not self._accept(0.0 if complete else min(_POLL_SECONDS, remaining)) and (complete or not remaining):
                break
        if missing := [index for index in range(self.receivers) if index not in self.connections]:
            raise TransportError(f"{_format_receivers(missing)} of {self.receivers} did not connect within {self.timeout:g} s")

    def _drop_stale(self) -> None:
        """Drop the connections of receivers that are gone, and messages about earlier publishes."""
        for index, connection in list(self.connections.items()):
            try:
                while connection.has_message():
                    connection.read()
            except TransportError:
                connection.close()
                del self.connections[index]

    def _accept(self, seconds: float) -> bool:
        """Accept one connection. Return False if none arrived in time."""
        self._socket.settimeout(seconds)
        try:
            sock, _ = self._socket.accept()
        except (TimeoutError, BlockingIOError):
            return False
        sock.setblocking(True)
        if _peer_credentials(sock)[1] not in (None, os.getuid()):
            sock.close()
            return True
        connection = ControlConnection(sock, "a receiver", self.timeout)
        with suppress(TransportError):
            hello = connection.receive("send its index")
            if isinstance(hello, ReceiverHello) and 0 <= hello.index < self.receivers:
                connection.peer = connection.peer.replace("a receiver", f"receiver {hello.index}")
                if (previous := self.connections.pop(hello.index, None)) is not None:
                    previous.close()
                self.connections[hello.index] = connection
        return True

    def send_all(self, message: Message) -> None:
        for connection in self.connections.values():
            connection.send(message)

    def wait_for_messages(self, awaited: Iterable[int], doing: str) -> list[tuple[int, Message]]:
        """Return at least one message from these receivers. Raises TransportError if one is gone or none sends a message in time."""
        connections = {index: self.connections[index] for index in awaited}
        deadline = time.monotonic() + self.timeout
        while True:
            self._check_stopped()
            arrived = wait(
                [connection.connection for connection in connections.values()],
                min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())),
            )
            if arrived:
                return [
                    (index, connection.read()) for index, connection in connections.items() if connection.connection in arrived
                ]
            for connection in connections.values():
                if not is_process_alive(connection.pid):
                    raise connection.make_lost_error()
            if time.monotonic() >= deadline:
                raise TransportError(f"{_format_receivers(sorted(connections))} did not {doing} within {self.timeout:g} s")

    def stop(self) -> None:
        """Make a wait in another thread fail with a TransportError."""
        self._stopped.set()

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise TransportError("the channel was closed")

    def close(self) -> None:
        self.stop()
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        self._socket.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def connect_to_sender(path: str, index: int, receivers: int, timeout: float) -> ControlConnection:
    """Connect a receiver to the sender. Raises TransportError if there is none, ValueError if ``index`` is out of range."""
    if not 0 <= index < receivers:
        raise ValueError(f"receiver {index} of {receivers}: indices start at 0; create the sender with the number of receivers")
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise TransportError(
            f"there is no sender at {path.lstrip(chr(0))!r} on this machine ({error}): it exited or closed the channel"
        ) from None
    if _peer_credentials(sock)[1] not in (None, os.getuid()):  # the sender exited, and another user bound the same name
        sock.close()
        raise TransportError(f"another user's process answers in the sender's place at {path.lstrip(chr(0))!r}")
    connection = ControlConnection(sock, "the sender", timeout)
    connection.send(ReceiverHello(index))
    return connection


def is_process_alive(pid: int | None) -> bool:
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


def machine_id() -> str:
    """Return an id of the pid namespace: host name, and on Linux also boot id and container. Equal pids under it are the same process."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _peer_credentials(sock: socket.socket) -> tuple[int | None, int | None]:
    """Return (pid, user id) of the process at the other end, None where the system does not report them."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None, None
    pid, user, _group = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid or None, user


def _make_socket_address() -> tuple[Path | None, str]:
    """Return a new socket address, with the folder to remove at the end, if it has one."""
    if sys.platform == "linux":
        return None, f"\0strop-weights-{secrets.token_hex(16)}"
    folder = Path(tempfile.mkdtemp(prefix="strop-"))
    return folder, str(folder / "socket")


def _format_receivers(indexes: Sequence[int]) -> str:
    return ("receiver " if len(indexes) == 1 else "receivers ") + ", ".join(map(str, indexes))
