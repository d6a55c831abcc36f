"""A folder is used by one run at a time, whoever dies."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from strop.storage import folder_lock
from strop.storage.files import StorageError
from strop.storage.folder_lock import LOCK_FILE, FolderLock, FolderLocked, lock_folders, make_holder, read_holder

HOLD = """
import os, sys, time
from pathlib import Path
from strop.storage.folder_lock import FolderLock
lock = FolderLock.acquire(Path(sys.argv[1]))
if len(sys.argv) > 2:
    child = os.fork() or os.execvp("sleep", ["sleep", "30"]) if sys.argv[2] == "exec" else os.fork()
    if child == 0:
        time.sleep(30)
    print(child)
print("locked", flush=True)
time.sleep(30)
"""


@contextmanager
def holder(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Another process that holds the folder, and what it printed before."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = [line.strip() for line in iter(process.stdout.readline, "locked\n")]
        yield process, said
    finally:
        process.kill()
        process.wait()


def test_a_folder_that_another_process_holds_is_refused_with_who_holds_it(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, _):
        with pytest.raises(FolderLocked) as caught:
            FolderLock.acquire(tmp_path)
        said = str(caught.value)
        assert f"process {process.pid} on " in said and " since 20" in said and f"kill {process.pid}" in said
        found = read_holder(tmp_path)
        assert found is not None and found.pid == process.pid


def test_after_a_kill_the_folder_is_free_at_once(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, _):
        process.kill()
        process.wait()
        started = time.monotonic()
        FolderLock.acquire(tmp_path).release()
        assert time.monotonic() - started < 1 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["fork", "exec"])
def test_children_of_a_killed_run_do_not_keep_its_folder(tmp_path: Path, kind: str) -> None:
    with holder(tmp_path, kind) as (process, said):
        process.kill()
        process.wait()
        try:
            os.kill(int(said[0]), 0)  # the child lives
            FolderLock.acquire(tmp_path).release()
        finally:
            os.kill(int(said[0]), signal.SIGKILL)


def test_a_child_that_ends_does_not_release_the_folder(tmp_path: Path) -> None:
    lock = FolderLock.acquire(tmp_path)
    if (child := os.fork()) == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(FolderLocked, match="another run of this process"):
        FolderLock.acquire(tmp_path)
    lock.release()


def test_a_stopped_process_keeps_its_folder(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, _):
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(FolderLocked):
            FolderLock.acquire(tmp_path)


def test_of_many_that_start_together_one_gets_the_folder(tmp_path: Path) -> None:
    start, got, refused = threading.Barrier(16), [], []

    def run() -> None:
        start.wait()
        try:
            got.append(FolderLock.acquire(tmp_path))
        except FolderLocked:
            refused.append(1)

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 15)
    got[0].release()
    got[0].release()


def leave(folder: Path, **changes: object) -> None:
    """Leave the lock of a process of another machine."""
    elsewhere = replace(make_holder(), host="elsewhere", boot="another", **changes)  # type: ignore[arg-type]
    (folder / LOCK_FILE).write_text(json.dumps(asdict(elsewhere)))


def test_a_holder_on_another_machine_whose_lock_is_free_is_replaced_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path, pid=77)
    found = read_holder(tmp_path)
    assert found is not None and found.pid == 77
    lock = FolderLock.acquire(tmp_path)
    assert "was last used by process 77 on elsewhere since " in caplog.text
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_said_and_its_files_are_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "flock", refuse)
    lock = FolderLock.acquire(tmp_path)
    assert "has no locks between processes" in caplog.text
    with pytest.raises(FolderLocked, match="another run of this process"):
        FolderLock.acquire(tmp_path)
    lock.release()
    for changes in ({"pid": 2**22 + 1}, {"started": "1"}):  # a dead process of this machine; a later one with its number
        dead = replace(make_holder(), **changes)  # type: ignore[arg-type]
        (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(dead)))
        FolderLock.acquire(tmp_path).release()
    assert list(tmp_path.iterdir()) == []
    leave(tmp_path)
    with pytest.raises(
        FolderLocked, match=r"process \d+ on elsewhere since .*kill \d+ on elsewhere\), or remove .*strop.lock if it is dead"
    ):
        FolderLock.acquire(tmp_path)


# --- the folders of a run ---------------------------------------------------------------------------------------------------


def test_if_the_second_folder_is_taken_the_first_is_given_back(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with (
        holder(tmp_path / "b"),
        pytest.raises(FolderLocked, match=r"^b_dir: .*or set another b_dir"),
        lock_folders({"a_dir": tmp_path / "a", "b_dir": tmp_path / "b"}),
    ):
        pass
    assert not (tmp_path / "a").exists()
    with lock_folders({"a_dir": tmp_path / "a", "again": tmp_path / "a"}):
        assert (tmp_path / "a" / LOCK_FILE).exists()
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize("what", ["file", "link", "below a file"])
def test_a_folder_that_cannot_be_is_named_with_its_key(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "logs"
    if what == "link":
        folder.symlink_to(tmp_path / "nowhere")
    else:
        folder.write_text("mine")
    said = "is a link to .*nowhere, which does not exist" if what == "link" else "is a file, not a folder"
    with (
        pytest.raises(StorageError, match=rf"^logger\.log_dir: .*logs {said}"),
        lock_folders({"logger.log_dir": folder / "run" if what == "below a file" else folder}),
    ):
        pass


def test_a_read_only_folder_is_named_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(folder_lock.os, "open", refuse)
    with (
        pytest.raises(StorageError, match=r"^logger\.log_dir: .* cannot be written: the file system is read-only"),
        lock_folders({"logger.log_dir": tmp_path}),
    ):
        pass
