"""Errors of folders: file system refusals in words, with the free space."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

# Error numbers of refused writes -> what to tell the user.
_REFUSALS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of this user or project is used up",
    errno.EFBIG: "the file system does not take files of this size",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EIO: "the device reports input/output errors",
    errno.ESTALE: "the file system was remounted or is gone (stale handle)",
}
OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)
_ERROR_NUMBER = re.compile(r"(?:\[errno|os error) (\d+)", re.IGNORECASE)  # as written by Arrow, Rust and remote tracebacks
_TORCH_WRITER = ("inline_container", "PytorchStreamWriter", "unexpected pos")  # torch.save gives no error number
_ALMOST_FULL = 1 << 24


class StorageError(RuntimeError):
    """A folder cannot be used or written. The message names the folder, the reason and what to do."""


def find_refusal(error: BaseException, folder: Path) -> str | None:
    """Describe why the file system of ``folder`` refused a write, or None for any other error.

    Call it before removing written files: errors without a number are distinguished by the free space.
    """
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno in _REFUSALS:
            return _REFUSALS[link.errno]
        text = str(link)
        for number in _ERROR_NUMBER.findall(text):
            if int(number) in _REFUSALS:
                return _REFUSALS[int(number)]
        if any(name in text for name in _TORCH_WRITER):
            full = free_bytes(folder) < _ALMOST_FULL
            return _REFUSALS[errno.ENOSPC] if full else "the file system refused a write: a quota, or a failing device"
    return None


def is_out_of_space(error: BaseException) -> bool:
    """Return whether a disk or quota is full, which may be temporary, according to the system or SQLite."""
    return any(
        (isinstance(link, OSError) and link.errno in OUT_OF_SPACE) or getattr(link, "sqlite_errorname", "") == "SQLITE_FULL"
        for each in _chain(error)
        for link in (each, getattr(each, "orig", None))  # SQLAlchemy's errors carry the database's own
    )


def free_bytes(folder: Path) -> int:
    """Return the number of bytes this user may write in ``folder``, or where it will be created."""
    for existing in (folder, *folder.absolute().parents):
        if existing.is_dir():
            return shutil.disk_usage(existing).free
    return 0


def format_bytes(count: float) -> str:
    """``1610612736`` -> ``1.6 GB``"""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
