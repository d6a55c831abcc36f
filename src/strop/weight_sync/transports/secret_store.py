"""A key-value store for a process group, served only to clients that know its secret.

torch's TCPStore listens on every interface, and anyone who reaches it can list, change and delete its keys. This one listens on
one address. Both sides prove that they know the secret before anything else is read: each answers the other's random challenge
with an HMAC. The rest is not encrypted: an attacker who can change packets in transit can still interfere.

    frame      length (4 bytes), content
    request    operation (1 byte), length of the key (2 bytes), key, value
    reply      0 or 1 (1 byte: whether the key exists), value
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed

SECRET_SIZE = 32  # bytes
LARGEST_FRAME = 1 << 20  # bytes
HANDSHAKE_SECONDS = 5.0
MAX_STRANGERS = 64  # connections in the handshake; further ones are closed at once
_POLL_SECONDS = 0.005  # seconds between polls for a key


class Operation(IntEnum):
    GET = 0
    SET = 1
    ADD = 2
    DELETE = 3
    COUNT = 4
    COMPARE = 5  # and set


class StoreClosed(RuntimeError):
    """The store's server, or its client's connection, is gone. A RuntimeError, like those of torch's stores."""


class SecretStoreServer:
    """Serves a dictionary on ``host`` to connections that know ``secret``."""

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._secret = secret
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._connections: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="strop-store", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), name="strop-store-client", daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError, struct.error):
            try:
                connection.settimeout(HANDSHAKE_SECONDS)
                known = _admit(connection, self._secret)
            finally:
                self._strangers.release()
            if not known:
                return
            connection.settimeout(None)
            self._connections.add(connection)
            try:
                while True:
                    _send(connection, self._answer(_receive(connection, LARGEST_FRAME)))
            finally:
                self._connections.discard(connection)

    def _answer(self, request: bytes) -> bytes:
        operation, size = struct.unpack_from("<BH", request)
        key, value = request[3 : 3 + size].decode(), request[3 + size :]
        with self._lock:
            existing = self._values.get(key)
            match operation:
                case Operation.SET:
                    self._values[key] = value
                case Operation.ADD:
                    existing = self._values[key] = str(int(existing or b"0") + int(value)).encode()
                case Operation.DELETE:
                    self._values.pop(key, None)
                case Operation.COUNT:
                    existing = str(len(self._values)).encode()
                case Operation.COMPARE:
                    (length,) = struct.unpack_from("<I", value)
                    expected, desired = value[4 : 4 + length], value[4 + length :]
                    if existing == expected or (existing is None and not expected):
                        existing = self._values[key] = desired
        return b"\0" if existing is None else b"\1" + existing

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        for connection in [*self._connections]:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class SecretStore(dist.Store):  # type: ignore[misc]
    """A client of the server, usable by torch's process groups, which must not outlive this object. Raises StoreClosed."""

    def __init__(self, host: str, port: int, secret: bytes, timeout: timedelta) -> None:
        super().__init__()
        self._address, self._secret, self._timeout = (host, port), secret, timeout
        self._lock = threading.Lock()
        try:
            self._connection = socket.create_connection((host, port), timeout.total_seconds())
            if not _introduce(self._connection, secret):
                raise StoreClosed("who answers there does not know this run's secret")
        except OSError as error:
            raise StoreClosed(str(error)) from error

    def _ask(self, operation: Operation, key: str = "", value: bytes = b"") -> bytes | None:
        name = key.encode()
        try:
            with self._lock:
                _send(self._connection, struct.pack("<BH", operation, len(name)) + name + value)
                reply = _receive(self._connection, LARGEST_FRAME)
        except (OSError, ValueError) as error:
            raise StoreClosed(f"the store at {self._address[0]}:{self._address[1]} is gone: {error}") from error
        return reply[1:] if reply[0] else None

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Operation.SET, key, _encode(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        value = self._ask(Operation.GET, key)
        if value is None:
            raise KeyError(key)
        return value

    def add(self, key: str, value: int) -> int:
        return int(self._ask(Operation.ADD, key, str(value).encode()) or 0)

    def check(self, keys: list[str]) -> bool:
        return all(self._ask(Operation.GET, key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        while not self.check(keys):
            if time.monotonic() >= deadline:
                raise RuntimeError(f"{', '.join(keys)} did not appear in the store in time")
            time.sleep(_POLL_SECONDS)

    def delete_key(self, key: str) -> bool:
        return self._ask(Operation.DELETE, key) is not None

    def num_keys(self) -> int:
        return int(self._ask(Operation.COUNT) or 0)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old = _encode(expected)
        return self._ask(Operation.COMPARE, key, struct.pack("<I", len(old)) + old + _encode(desired)) or old

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def clone(self) -> SecretStore:
        return SecretStore(*self._address, self._secret, self._timeout)

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def make_secret() -> bytes:
    return secrets.token_bytes(SECRET_SIZE)


def _admit(connection: socket.socket, secret: bytes) -> bool:
    """Return whether the client knows the secret; if so, prove that this server knows it too."""
    ours = secrets.token_bytes(SECRET_SIZE)
    _send(connection, ours)
    answer = _receive(connection, 2 * SECRET_SIZE)
    theirs, proof = answer[:SECRET_SIZE], answer[SECRET_SIZE:]
    if len(theirs) != SECRET_SIZE or not hmac.compare_digest(proof, _prove(secret, b"client", ours + theirs)):
        return False
    _send(connection, _prove(secret, b"server", ours + theirs))
    return True


def _introduce(connection: socket.socket, secret: bytes) -> bool:
    """Prove to the server that this client knows the secret. Return whether the server knows it too."""
    try:
        theirs, ours = _receive(connection, SECRET_SIZE), secrets.token_bytes(SECRET_SIZE)
        _send(connection, ours + _prove(secret, b"client", theirs + ours))
        return hmac.compare_digest(_receive(connection, SECRET_SIZE), _prove(secret, b"server", theirs + ours))
    except ValueError:
        return False


def _prove(secret: bytes, role: bytes, challenges: bytes) -> bytes:
    return hmac.digest(secret, role + challenges, hashlib.sha256)


def _encode(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(struct.pack("<I", len(content)) + content)


def _receive(connection: socket.socket, limit: int) -> bytes:
    """Return the content of a frame. Raises OSError if the connection ends, ValueError for a frame of more than ``limit`` bytes."""
    (size,) = struct.unpack("<I", _read(connection, 4))
    if size > limit:
        raise ValueError(f"a message of {size} bytes, where at most {limit} are read")
    return _read(connection, size)


def _read(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = connection.recv(min(size - len(content), 1 << 16))
        if not part:
            raise ConnectionError("the connection was closed")
        content += part
    return bytes(content)
