"""Connections between a sender and its receivers on one machine: a ``multiprocessing`` connection over a Unix socket for each receiver.

A connection also reveals that the other side is gone: the kernel closes its end when its process ends for any reason. A fork may
keep it open, so the process is checked too, if the system reports its pid. On Linux the socket has no file; elsewhere it is in a
folder that only this user can access.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any

from strop.weight_sync.base import TransportError

POLL_SECONDS = 0.5  # between liveness checks of silent processes


class PeerConnection:
    """A connection to another process. ``peer`` is how error messages name that process."""

    def __init__(self, connection: Connection, peer: str, pid: int | None) -> None:
        self.connection, self.pid = connection, pid
        self.peer = f"{peer} (process {pid})" if pid else peer

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self.make_lost_error() from None

    def read(self) -> Any:
        """Return an arrived message. Raises TransportError if the peer is gone."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise self.make_lost_error() from None

    def has_message(self) -> bool:
        """Whether a message, or the end of the connection, has arrived."""
        return self.connection.poll()

    def make_lost_error(self) -> TransportError:
        return TransportError(f"{self.peer} went away: it closed the channel, exited or was killed")


def wait_for_peers(
    peers: Iterable[PeerConnection], timeout: float, late: str, check_open: Callable[[], None] = lambda: None
) -> list[PeerConnection]:
    """Return the peers (at least one) that have sent a message. Raises TransportError if one is gone, and with ``late`` at the
    timeout.
    """
    waiting = {peer.connection: peer for peer in peers}
    deadline = time.monotonic() + timeout
    while True:
        check_open()
        try:
            arrived = wait(waiting, min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        except OSError:  # another thread closed the connection
            raise next(iter(waiting.values())).make_lost_error() from None
        if arrived:
            return [peer for connection, peer in waiting.items() if connection in arrived]
        for peer in waiting.values():
            if not is_process_alive(peer.pid):
                raise peer.make_lost_error()
        if time.monotonic() >= deadline:
            raise TransportError(late)


def listen(backlog: int) -> tuple[socket.socket, str]:
    """Return a listening socket and its path. On Linux the path is abstract: it begins with a null byte and is no file."""
    name = f"strop-weights-{secrets.token_hex(16)}"
    path = f"\0{name}" if sys.platform == "linux" else str(Path(tempfile.mkdtemp(prefix="strop-")) / name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(backlog)
    return listener, path


def close_listener(listener: socket.socket, path: str) -> None:
    listener.close()
    if not path.startswith("\0"):
        shutil.rmtree(Path(path).parent, ignore_errors=True)


def accept_receiver(listener: socket.socket, timeout: float) -> tuple[int, PeerConnection] | None:
    """Accept a waiting connection. Return the receiver's index and its connection, or None if it is not a receiver of this user."""
    accepted, _ = listener.accept()
    connection = Connection(accepted.detach())
    pid, user = _peer_credentials(connection)
    if user in (None, os.getuid()):  # checked before anything it sends is unpickled
        with suppress(EOFError, OSError):
            if connection.poll(timeout):
                index: int = connection.recv()
                return index, PeerConnection(connection, f"receiver {index}", pid)
    connection.close()
    return None


def connect_to_sender(path: str, index: int, receivers: int) -> PeerConnection:
    """Connect a receiver to the sender. Raises TransportError if there is none, ValueError if ``index`` is out of range."""
    if not 0 <= index < receivers:
        raise ValueError(f"receiver {index} of {receivers}: indices start at 0; create the sender with the number of receivers")
    name = path.lstrip("\0")
    try:
        connection = Client(path, "AF_UNIX")
    except OSError as error:
        raise TransportError(
            f"there is no sender at {name!r} on this machine ({error}): it exited or closed the channel"
        ) from None
    pid, user = _peer_credentials(connection)
    if user not in (None, os.getuid()):  # the sender exited, and another user bound the same name
        connection.close()
        raise TransportError(f"another user's process answers in the sender's place at {name!r}")
    peer = PeerConnection(connection, "the sender", pid)
    peer.send(index)
    return peer


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
    """Return an id of the pid namespace: host name, and on Linux also boot id and container. Under it, equal pids mean the same
    process.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _peer_credentials(connection: Connection) -> tuple[int | None, int | None]:
    """Return (pid, user id) of the process at the other end, None where the system does not report them."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None, None
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        pid, user, _group = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid or None, user
