"""Test, before a run starts, whether its folders are writable."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from pathlib import Path

from strop.storage.storage_error import StorageError, find_refusal, format_bytes, free_bytes

_PROBE_SIZE = 1 << 16
_IN_THE_WAY = re.compile(r"(\.tmp_)?step_[0-9]+")


def prepare_folder(key: str, folder: Path) -> None:
    """Create the folder that ``key`` names. Raises StorageError with the key if it cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{key}: {explain_folder(folder, error)}") from error


def probe_folder(key: str, folder: Path) -> None:
    """Write a file to the folder, flush it to disk and remove it. Raises StorageError with the key."""
    prepare_folder(key, folder)
    probe = folder / f".strop_probe_{os.getpid()}_{secrets.token_hex(4)}"
    try:
        try:
            with probe.open("wb") as file:
                file.write(bytes(_PROBE_SIZE))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{key}: {explain_folder(folder, error)}") from error


def find_folder_problem(folder: Path) -> str | None:
    """Return why a folder can neither be written nor created; None if it can. Nothing is left in it."""
    # A file or a dangling link counts as existing, because nothing can be created there.
    existing = next(path for path in (folder, *folder.parents) if path.is_symlink() or path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".strop_probe_", dir=existing):
            return None
    except OSError as error:
        return explain_folder(folder, error)


def explain_folder(folder: Path, error: OSError) -> str:
    """Explain why a folder cannot be created or written, and what to do."""
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {os.readlink(path)}, which does not exist; create that folder, or set another one"
        if path.exists():
            if not path.is_dir():
                return f"{path} is a file, not a folder; remove it, or set another folder"
            break
    reason = find_refusal(error, folder) or error.strerror or str(error)
    free = f" ({format_bytes(free_bytes(folder))} free)" if "full" in reason or "quota" in reason else ""
    return f"{folder} cannot be written: {reason}{free}; set a folder that this user can write"


def check_entries(key: str, folder: Path) -> None:
    """Check that no file has the name of a checkpoint folder. Raises StorageError with the key."""
    for path in sorted(folder.iterdir()):
        if _IN_THE_WAY.fullmatch(path.name) and not path.is_dir():
            raise StorageError(
                f"{key}: {path} is {'a dangling link' if path.is_symlink() else 'a file'}, and a checkpoint would be a folder of that "
                "name; move it away, or set another folder"
            )


def check_space(key: str, folder: Path, needed: int, what: str) -> None:
    """Check that ``needed`` bytes are free. Raises StorageError with the key, the folder, and what is needed and free."""
    free = free_bytes(folder)
    if free < needed:
        raise StorageError(
            f"{key}: {folder} has {format_bytes(free)} free, and {what} needs {format_bytes(needed)}; make room there, set another folder"
            ", or save less (checkpointing.save_optimizer=false, or checkpointing.enabled=false)"
        )
