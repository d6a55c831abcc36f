"""The store of a broadcast answers those who know its secret, on one address; a stranger neither ends a publish nor receives one."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from strop.weight_sync.base import TransportError
from strop.weight_sync.transports import secret_store
from strop.weight_sync.transports.broadcast import BroadcastSender
from strop.weight_sync.transports.secret_store import SecretStore, SecretStoreServer, StoreClosed, make_secret
from support.transports import CPU, expected_fingerprints, make_manifest, make_tensors, receive_on_demand, spawn_child

SECOND = timedelta(seconds=1)


@pytest.fixture
def server() -> Iterator[SecretStoreServer]:
    server = SecretStoreServer("127.0.0.1", 0, b"known")
    yield server
    server.close()


def client(server: SecretStoreServer, secret: bytes = b"known") -> SecretStore:
    return SecretStore("127.0.0.1", server.port, secret, SECOND)


def test_the_store_does_what_torch_asks_of_one(server: SecretStoreServer) -> None:
    one, other = client(server), client(server)
    two = dist.PrefixStore("group", other)
    assert not one.check(["a"])
    one.set("a", "1")
    assert one.get("a") == b"1"
    two.set("a", b"\0\xff" * 1000)
    assert one.get("group/a") == two.get("a") == b"\0\xff" * 1000
    assert (one.add("count", 2), two.add("count", 5), one.add("count", 1)) == (2, 5, 3)
    assert one.compare_set("new", "", "x") == b"x"
    assert one.compare_set("new", "y", "z") == b"x"
    assert one.compare_set("new", "x", "z") == b"z"
    assert one.num_keys() == 5
    assert one.delete_key("new") and not one.delete_key("new")
    with pytest.raises(RuntimeError, match="did not appear"):
        one.wait(["never"], timedelta(seconds=0.05))
    server.close()
    with pytest.raises(StoreClosed):
        one.get("a")


def test_who_does_not_know_the_secret_is_not_answered(server: SecretStoreServer) -> None:
    client(server).set("a", "1")
    with pytest.raises(StoreClosed):
        client(server, b"guessed")
    with socket.create_connection(("127.0.0.1", server.port), 1) as stranger:
        stranger.sendall(struct.pack("<IBH", 4, 1, 1) + b"a")
        heard = b""
        while part := stranger.recv(4096):
            heard += part
    assert len(heard) == 4 + secret_store.SECRET_SIZE  # the challenge
    assert client(server).get("a") == b"1"


def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        connection, _ = listener.accept()
        for _ in range(2):
            secret_store._send(connection, b"c" * secret_store.SECRET_SIZE)

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(StoreClosed, match="does not know this run's secret"):
        SecretStore("127.0.0.1", listener.getsockname()[1], make_secret(), SECOND)
    thread.join()
    listener.close()


def test_a_frame_that_is_too_large_is_not_read(server: SecretStoreServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 1) as stranger:
        stranger.sendall(struct.pack("<I", 1 << 31))
        stranger.recv(4096)
        assert stranger.recv(4096) == b""


def test_strangers_that_wait_are_closed_and_do_not_keep_others_out(
    server: SecretStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_store, "HANDSHAKE_SECONDS", 0.1)
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 1)) for _ in range(32)]
        client(server).set("a", "1")
        for stranger in strangers:
            stranger.recv(4096)
            assert stranger.recv(4096) == b""


def test_the_secret_is_not_shown() -> None:
    sender = BroadcastSender(1)
    assert repr(sender.address.secret) not in repr(sender.address) and len(sender.address.secret) == secret_store.SECRET_SIZE
    sender.close()


def test_a_sender_listens_on_its_own_address_only() -> None:
    sender = BroadcastSender(1)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", sender.address.port), 1)
    sender.close()


def test_a_stranger_neither_ends_a_publish_nor_receives_it() -> None:
    tensors = make_tensors(0)
    manifest = make_manifest()
    sender = BroadcastSender(1, timeout=20)
    with pytest.raises(TransportError, match="there is no sender"):
        replace(sender.address, secret=b"guessed").connect(0, CPU)
    with ExitStack() as stack:
        child = stack.enter_context(spawn_child(receive_on_demand, sender.address, 0))
        assert child.answer() == "connected"
        child.pipe.send(manifest)
        strangers: list[Any] = [
            stack.enter_context(socket.create_connection(("127.0.0.1", sender.address.port), 1)) for _ in range(4)
        ]
        for stranger in strangers:
            stranger.sendall(b"failed/1" * 20)
        with pytest.raises(RuntimeError):
            dist.TCPStore("127.0.0.1", sender.address.port, None, False, timeout=SECOND, wait_for_workers=False).set(
                "failed/1", "no"
            )
        sender.send(manifest, iter(tensors))
        assert child.answer() == expected_fingerprints(tensors, manifest)
    sender.close()
