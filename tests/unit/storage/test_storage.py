"""Full disks, damaged files, and folders that are tried before a run starts."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.storage import folder_lock
from strop.storage.checksums import FileChecksum, compute_checksums, decode_checksums, encode_checksums, find_damage
from strop.storage.files import RecordFiles, StorageError, find_refusal
from strop.storage.folder_lock import check_entries, check_space, probe_folder
from support.full_disk import FullDisk

ARROW = "[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the quota"),
        (OSError(errno.EROFS, "Read-only file system"), "read-only"),
        (OSError(errno.EIO, "Input/output error"), "input/output errors"),
        (OSError(ARROW), "the disk is full"),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "the disk is full"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 5952 vs 5844"), "refused a write: a quota"),
        (ValueError("something else"), None),
        (FileNotFoundError(errno.ENOENT, "No such file"), None),
    ],
)
def test_errors_of_a_full_disk_are_recognised_however_they_are_raised(tmp_path: Path, error: Exception, said: str | None) -> None:
    try:
        try:
            raise error
        except Exception as inner:
            raise RuntimeError("a rank failed") from inner
    except RuntimeError as outer:
        found = find_refusal(outer, tmp_path)
    assert found is None if said is None else said in str(found)


def test_torch_names_no_error_number_so_the_free_space_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.storage.files.free_bytes", lambda _: 1000)
    assert find_refusal(RuntimeError("unexpected pos 5952 vs 5844"), tmp_path) == "the disk is full"


# --- records ---------------------------------------------------------------------------------------------------------


def test_files_that_a_full_disk_refuses_are_lost_with_a_warning_and_later_ones_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, files = FullDisk(tmp_path, monkeypatch), RecordFiles("rollouts")
    assert files.write(tmp_path / "1", b"one")
    disk.full = True
    assert not files.write(tmp_path / "2", b"two") and not files.write(tmp_path / "1", b"uno")
    assert caplog.text.count("rollouts cannot be written") == 1 and "the disk is full" in caplog.text
    disk.full = False
    assert files.write(tmp_path / "3", b"three") and files.write(tmp_path / "4", b"four")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"1": b"one", "3": b"three", "4": b"four"}
    assert caplog.text.count("written again") == 1 and "from 3 on: 2 files before it are lost" in caplog.text


# --- checksums ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(b"onf"), "b/one is damaged: its checksum differs from when it was saved"),
        (lambda path: path.write_bytes(b"on"), "b/one has 2 bytes, and 3 were saved"),
        (lambda path: path.unlink(), "b/one is missing"),
        (lambda path: None, None),
    ],
)
def test_a_file_that_is_not_as_it_was_saved_is_found(tmp_path: Path, damage: Callable[[Path], None], said: str | None) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b" / "one").write_bytes(b"one")
    (tmp_path / "c").write_bytes(b"not listed")
    saved = decode_checksums(encode_checksums(compute_checksums(tmp_path, ["a", "b"])))
    assert saved.keys() == {"a", "b/one"} and saved["b/one"].bytes == 3
    damage(tmp_path / "b" / "one")
    found = find_damage(tmp_path, saved)
    assert found is None if said is None else said in str(found)


def test_checkpoints_of_earlier_versions_have_sizes_only(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"xyz")
    assert decode_checksums({"a": 3}) == {"a": FileChecksum(3)}
    assert find_damage(tmp_path, {"a": FileChecksum(3)}) is None
    assert "has 3 bytes, and 4 were saved" in str(find_damage(tmp_path, {"a": FileChecksum(4)}))
    listed = encode_checksums({"weights": FileChecksum(3, "ab")})
    with pytest.raises(ValueError, match="the list of files has changed since it was saved"):
        decode_checksums({name.replace("weights", "weightr"): value for name, value in listed.items()})
    for broken in ([], {"a": "3"}, {"a": {"bytes": 3}}):
        with pytest.raises(ValueError, match="expected sizes and checksums"):
            decode_checksums(broken)


# --- probes ------------------------------------------------------------------------------------------------------------------


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    probe_folder("logger.log_dir", tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_without_room_says_so_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_lock.os, "fsync", refuse)
    with pytest.raises(StorageError, match=r"^logger\.log_dir: .*cannot be written: the disk is full \(.* free\); set a folder"):
        probe_folder("logger.log_dir", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["step_5", ".tmp_step_5", "step_7"])
def test_a_file_with_the_name_of_a_checkpoint_is_found_at_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / "step_4").mkdir()
    (tmp_path / "steps.txt").write_text("")
    check_entries("checkpointing.checkpoint_dir", tmp_path)
    (tmp_path / name).write_text("") if name != "step_7" else (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(
        StorageError, match=rf"^checkpointing\.checkpoint_dir: .*{name} is a .*, and a checkpoint would be a folder"
    ):
        check_entries("checkpointing.checkpoint_dir", tmp_path)


def test_too_little_space_names_key_folder_needed_and_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_space("checkpointing.checkpoint_dir", tmp_path, 1, "one checkpoint")
    monkeypatch.setattr(folder_lock, "free_bytes", lambda _: 300_000_000)
    said = rf"^checkpointing\.checkpoint_dir: {tmp_path} has 300\.0 MB free, and one checkpoint needs 1\.6 GB"
    with pytest.raises(StorageError, match=said):
        check_space("checkpointing.checkpoint_dir", tmp_path, 1_600_000_000, "one checkpoint")
