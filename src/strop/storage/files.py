"""Files: written atomically, as records of a run, read as text; refusals of the file system in words; paths."""

from __future__ import annotations

import codecs
import errno
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

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


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, then rename it to ``path``. File and rename are flushed to disk (fsync)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        fsync_path(temporary)
        os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        with suppress(OSError):  # the file system became read-only; its own error is raised
            temporary.unlink(missing_ok=True)


def fsync_path(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RecordFiles:
    """Writes whole files atomically. Refused writes are lost, with a warning. Other errors are raised."""

    def __init__(self, what: str) -> None:
        self.what = what  # for warnings, such as "rollouts"
        self._lost = 0  # files, since the last successful write

    def write(self, path: Path, content: bytes) -> bool:
        """Write a file. Return whether it is on disk."""
        try:
            with atomic_write(path) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            reason = find_refusal(error, path.parent)
            if reason is None:
                raise
            self._lost += 1
            if self._lost == 1:
                free = format_bytes(free_bytes(path.parent))
                log.warning(
                    "%s cannot be written to %s: %s (%s free). %s and later ones are lost until there is room",
                    self.what, path.parent, reason, free, path.name,
                )  # fmt: skip
            return False
        if self._lost:
            log.warning("%s are written again, from %s on: %d files before it are lost", self.what, path.name, self._lost)
        self._lost = 0
        return True


_OTHER_MARKS = {"UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)}


class NotUtf8(ValueError):
    """A file is text in another encoding, or no text. The message names the file and the line."""


def read_text_file(path: Path | str) -> str:
    """Return the text of a file, without a byte order mark. Raises OSError, NotUtf8."""
    path = Path(path).expanduser()
    return decode_text(path.read_bytes(), path)


def decode_text(content: bytes, path: Path | str) -> str:
    """Return text without a byte order mark. Raises NotUtf8."""
    for name, marks in _OTHER_MARKS.items():
        if content.startswith(marks):
            raise NotUtf8(f"{path} is {name} text; save it as UTF-8")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise NotUtf8(
            f"{path}:{line} is not UTF-8 text (the byte 0x{content[error.start]:02x}, perhaps of Latin-1 or Windows-1252); save it as UTF-8"
        ) from error


def clean_json(value: Any) -> Any:
    """Return nested values with None for numbers that are not finite, and lists for tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): clean_json(item) for name, item in value.items()}
    return [clean_json(item) for item in value] if isinstance(value, list | tuple) else value


def shorten_path(path: Path) -> Path:
    """Return an absolute path relative to the working directory if it lies in it. Valid until the directory changes."""
    try:
        return path.relative_to(Path.cwd())
    except (ValueError, OSError):  # outside; or the working directory was removed
        return path


def user_cache_folder() -> Path:
    """Return the folder of Strop in the user's cache, which may not exist yet: ``XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strop"
