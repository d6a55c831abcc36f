"""Ray on a host that others use: whose cluster is joined, and who may join a run's own."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.distributed import ray as module
from strop.distributed.base import serve_store
from strop.distributed.cluster_config import ClusterConfig
from strop.distributed.ray import connect


@pytest.fixture
def cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Ray's file with the address of a cluster on this machine, where something listens."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    listener = socket.create_server(("127.0.0.1", 0))
    path = tmp_path / "ray" / "ray_current_cluster"
    path.parent.mkdir()
    path.write_text(f"127.0.0.1:{listener.getsockname()[1]}")
    path.chmod(0o644)
    yield path
    listener.close()


def test_a_cluster_that_this_user_started_is_found(cluster_file: Path) -> None:
    assert module._find_local_cluster() == cluster_file.read_text()


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_an_address_that_others_may_write_is_refused_with_the_key_to_set(cluster_file: Path, mode: int) -> None:
    cluster_file.chmod(mode)
    with pytest.raises(ConnectionError, match=r"can be written by other users.*cluster.address=127.*cluster.address=local"):
        module._find_local_cluster()


def test_an_address_of_another_user_is_refused_with_the_key_to_set(cluster_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: cluster_file.stat().st_uid + 1)
    with pytest.raises(ConnectionError, match=r"belongs to user \d+.*cluster.address=local"):
        asyncio.run(connect(ClusterConfig(), on_cpu=True))


@pytest.mark.parametrize("what", ["link", "pipe", "text", "nobody listens"])
def test_what_is_no_file_with_the_address_of_a_running_cluster_is_ignored(cluster_file: Path, what: str) -> None:
    text = cluster_file.read_text()
    cluster_file.unlink()
    if what == "link":
        (cluster_file.parent / "target").write_text(text)
        cluster_file.symlink_to("target")
    elif what == "pipe":
        os.mkfifo(cluster_file)
    else:
        cluster_file.write_text("no address" if what == "text" else "127.0.0.1:1")
    assert module._find_local_cluster() is None


def test_the_store_of_the_ranks_listens_on_one_address_only() -> None:
    store = serve_store("127.0.0.1", 2, 5)
    store.set("a", "1")
    assert store.get("a") == b"1"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", store.port), 1)
