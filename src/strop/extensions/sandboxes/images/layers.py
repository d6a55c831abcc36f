"""Unpacks the layers of an image (OCI image specification 1.1, "Image Layer Filesystem Changeset") into folders for overlayfs.

A layer is hostile data. Each layer becomes a separate folder; every path is resolved inside it and the layers below it, so that neither
``..`` nor a symbolic link leads out of them. Files keep their modes without setuid, setgid; devices are left out; extended attributes are
not read. A whiteout ``.wh.NAME`` becomes overlayfs' character device 0/0 (or just removes what the same layer has), an opaque folder gets
the attribute ``user.overlay.opaque``. Sizes, entries and headers are bounded.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import shutil
import stat
import tarfile
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from strop.extensions.sandboxes.base import FailureCause, SandboxFailure

MAX_HEADER = 1 << 20  # bytes of one extended header, which is read into memory
MAX_NAME, MAX_DEPTH, MAX_LINKS = 4096, 256, 40  # of a path, as Linux bounds it
OPAQUE = "user.overlay.opaque"
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


@dataclass(frozen=True, kw_only=True)
class LayerLimits:
    """What one image may be, unpacked."""

    total_mb: int = 20_000
    entries: int = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Owners:
    """Which users of this machine own the files of an image."""

    base: int | None = None  # user and group n of the image are base + n; None: all belong to the user of this process
    count: int = 65536

    def own(self, path: Path, uid: int, gid: int) -> None:
        if self.base is not None:
            uid, gid = (self.base + (number if 0 <= number < self.count else self.count - 2) for number in (uid, gid))
            os.chown(path, uid, gid, follow_symlinks=False)


@dataclass
class Unpacked:
    """What has been written so far, of all layers of an image."""

    limits: LayerLimits
    size: int = 0  # bytes
    entries: int = 0
    dropped: list[str] = field(default_factory=list)  # devices, the first hundred

    def add(self, size: int, name: str) -> None:
        self.entries += 1
        self.size += size
        if self.entries > self.limits.entries or self.size > self.limits.total_mb << 20:
            raise broken(
                f"it is larger than {self.limits.total_mb} MB or {self.limits.entries} files, unpacked (at {name!r:.100}); raise "
                "sandboxes.max_image_mb if it may be"
            )


def broken(why: str) -> SandboxFailure:
    return SandboxFailure(FailureCause.IMAGE, f"the image cannot be used: {why}")


class _BoundedEntry(tarfile.TarInfo):
    """An entry whose extended headers, which ``tarfile`` reads whole, are bounded."""

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        if self.type in _EXTENDED and self.size > MAX_HEADER:
            raise broken(f"a header of {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc]


def open_layer(blob: IO[bytes], media_type: str = "") -> IO[bytes]:
    """Return the tar stream of a layer. Raises SandboxFailure for a compression that is not known."""
    start = blob.read(6)
    blob.seek(0)
    if start[:2] == b"\x1f\x8b":
        return cast(IO[bytes], gzip.GzipFile(fileobj=blob, mode="rb"))
    if start[:4] == b"\x28\xb5\x2f\xfd":
        try:
            import zstandard  # type: ignore[import-not-found]
        except ImportError:
            raise broken("its layers are compressed by zstd; pip install zstandard") from None
        return cast(IO[bytes], zstandard.ZstdDecompressor().stream_reader(blob))
    if start in (b"\xfd7zXZ\x00",) or start[:3] == b"BZh":
        raise broken(f"a layer of type {media_type or 'xz or bzip2'} is not known; it must be tar, tar+gzip or tar+zstd")
    return blob


def unpack_layer(
    blob: IO[bytes], into: Path, below: Sequence[Path], owners: Owners, done: Unpacked, media_type: str = ""
) -> None:
    """Unpack one layer into a new folder. ``below``: the folders of the layers under it, the nearest first. Raises SandboxFailure."""
    into.mkdir()
    into.chmod(0o755)
    owners.own(into, 0, 0)
    writer = _LayerWriter(into, tuple(below), owners, done)
    try:
        with (
            closing(open_layer(blob, media_type)) as stream,
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_BoundedEntry, bufsize=1 << 16) as archive,
        ):
            while (entry := archive.next()) is not None:
                writer.write(entry, archive)
                archive.members.clear()  # type: ignore[attr-defined]  # two million of them are a gigabyte
        writer.finish()
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, ValueError, OverflowError) as error:
        raise broken(f"a layer is damaged: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SandboxFailure(
                FailureCause.DISK, f"no space is left for an image in {into}: lower sandboxes.cache_gb"
            ) from error
        raise broken(f"a layer cannot be unpacked: {error}") from error


class _LayerWriter:
    """Writes the entries of one layer. Nothing else writes below its folders meanwhile, so paths that were looked at stay as they are."""

    def __init__(self, into: Path, below: tuple[Path, ...], owners: Owners, done: Unpacked) -> None:
        self.into, self.below, self.owners, self.done = into, below, owners, done
        self.folders: dict[str, tuple[int, float]] = {}  # modes and times, set last: writing into them changes or needs both
        self.opaque: set[str] = set()
        self.resolved: dict[tuple[str, ...], str] = {}  # what resolve_parent found, until a link or a whiteout changes it

    def write(self, entry: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        names = split_path(entry.name)
        if not names:  # the root itself
            if entry.isdir():
                self._set("", entry)
            return
        self.done.add(entry.size if entry.isreg() else 0, entry.name)
        parent = self.resolve_parent(names[:-1])
        name = names[-1]
        if name.startswith(".wh."):
            self._white_out(parent, name)
            return
        path = f"{parent}/{name}" if parent else name
        if entry.isdev() and not entry.isfifo():
            if len(self.done.dropped) < 100:
                self.done.dropped.append(entry.name)
            return
        self._place(path, entry, archive)

    def _place(self, path: str, entry: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        target = self.into / path
        found = _lstat(target)
        if entry.isdir():
            if found is None or not stat.S_ISDIR(found.st_mode):
                self._remove(path, found)
                os.mkdir(target, 0o700)
        else:
            self._remove(path, found)
            if entry.isreg():
                self._write_file(target, entry, archive)
            elif entry.issym():
                os.symlink(entry.linkname, target)
                self.resolved.clear()
            elif entry.isfifo():
                os.mkfifo(target, 0o600)
            elif entry.islnk():
                self._link(target, entry)
                return  # owner and mode are those of the file
            else:
                raise broken(f"the entry {entry.name!r:.100} is of an unknown type")
        self._set(path, entry)

    def _write_file(self, target: Path, entry: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        source = archive.extractfile(entry)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(target, flags, 0o600), "wb", buffering=0) as file:
            left = entry.size
            while left and source is not None:
                part = source.read(min(left, 1 << 20))
                if not part:
                    raise broken(f"the file {entry.name!r:.100} is cut off")
                left -= file.write(part) if part.strip(b"\0") else _skip(file, len(part))
            file.truncate(entry.size)

    def _link(self, target: Path, entry: tarfile.TarInfo) -> None:
        """A hard link is to a file of the same layer; overlayfs has no links across layers."""
        names = split_path(entry.linkname)
        if not names:
            raise broken(f"the hard link {entry.name!r:.100} leads nowhere")
        source = self.into / self.resolve_parent(names[:-1]) / names[-1]
        found = _lstat(source)
        if found is None or stat.S_ISDIR(found.st_mode) or stat.S_ISCHR(found.st_mode):
            raise broken(f"the hard link {entry.name!r:.100} leads to {entry.linkname!r:.100}, which is no file of its layer")
        os.link(source, target, follow_symlinks=False)

    def _white_out(self, parent: str, name: str) -> None:
        self.resolved.clear()
        if name == ".wh..wh..opq":
            self.opaque.add(parent)
            return
        if name.startswith(".wh..wh."):  # of AUFS
            return
        hidden = name.removeprefix(".wh.")
        if hidden in ("", ".", ".."):
            raise broken(f"the whiteout {name!r} names no file")
        target = self.into / parent / hidden
        found = _lstat(target)
        if found is not None:  # a whiteout hides what is below this layer, wherever it stands in the archive
            if stat.S_ISDIR(found.st_mode):
                self.opaque.add(f"{parent}/{hidden}" if parent else hidden)
        elif any(_lstat(folder / parent / hidden) is not None for folder in self.below):
            os.mknod(target, stat.S_IFCHR, os.makedev(0, 0))

    def finish(self) -> None:
        for path in self.opaque if self.below else ():
            if (found := _lstat(self.into / path)) is not None and stat.S_ISDIR(found.st_mode):
                os.setxattr(self.into / path, OPAQUE, b"y", follow_symlinks=False)
        own = 0o700 if os.geteuid() else 0  # without privileges this process could not enter or remove others
        for path, (mode, when) in sorted(self.folders.items(), reverse=True):  # the deepest first
            if (found := _lstat(self.into / path)) is not None and stat.S_ISDIR(found.st_mode):
                os.chmod(self.into / path, mode | own)
                _set_time(self.into / path, when)

    def resolve_parent(self, names: Sequence[str]) -> str:
        """Return the folder that ``names`` lead to, with links followed inside the image; made here if only layers below have it."""
        if (known := self.resolved.get(tuple(names))) is not None:
            return known
        ahead, at, links = list(reversed(names)), "", 0
        while ahead:
            name = ahead.pop()
            if name == "..":
                at = at.rpartition("/")[0]
                continue
            path = f"{at}/{name}" if at else name
            found, where = self._find(path)
            if found is not None and stat.S_ISLNK(found.st_mode):
                links += 1
                target = os.readlink(where / path)
                steps = split_path(target, keeps_up=True)
                ahead += reversed(steps)
                if links > MAX_LINKS or len(ahead) > MAX_DEPTH:
                    raise broken(f"{'/'.join(names)!r:.100} leads through too many links")
                at = "" if target.startswith("/") else at
                continue
            if found is None or where != self.into or not stat.S_ISDIR(found.st_mode):
                self._make_folder(path, found if found is not None and stat.S_ISDIR(found.st_mode) else None)
            at = path
        self.resolved[tuple(names)] = at
        return at

    def _find(self, path: str) -> tuple[os.stat_result | None, Path]:
        """Return what the image has at a path whose parents are folders, and in which layer."""
        for folder in (self.into, *self.below):
            found = _lstat(folder / path)
            if found is not None:
                return (None if stat.S_ISCHR(found.st_mode) else found), folder
            if self._is_hidden_below(folder, path):
                break
        return None, self.into

    def _is_hidden_below(self, folder: Path, path: str) -> bool:
        """Whether a layer hides what those under it have at a path, by an opaque parent or a parent that is no folder."""
        while path := path.rpartition("/")[0]:
            found = _lstat(folder / path)
            if found is not None and not stat.S_ISDIR(found.st_mode):
                return True
            if found is not None and (path in self.opaque if folder == self.into else _is_opaque(folder / path)):
                return True
        return False

    def _make_folder(self, path: str, like: os.stat_result | None) -> None:
        target = self.into / path
        self._remove(path, _lstat(target))
        os.mkdir(target)
        target.chmod(stat.S_IMODE(like.st_mode) if like is not None else 0o755)
        if self.owners.base is not None:
            uid, gid = (like.st_uid, like.st_gid) if like is not None else (self.owners.base, self.owners.base)
            os.chown(target, uid, gid, follow_symlinks=False)

    def _remove(self, path: str, found: os.stat_result | None) -> None:
        """Remove what an earlier entry of this layer put at a path."""
        if found is None:
            return
        self.resolved.clear()
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(self.into / path)
        else:
            os.unlink(self.into / path)
            if stat.S_ISCHR(found.st_mode):
                self.opaque.add(path)  # what replaces a whiteout is not merged with what the whiteout hid

    def _set(self, path: str, entry: tarfile.TarInfo) -> None:
        target = self.into / path
        self.owners.own(target, entry.uid, entry.gid)
        if entry.isdir():
            self.folders[path] = (entry.mode & 0o1777, entry.mtime)
            return
        if not entry.issym():
            os.chmod(target, entry.mode & 0o777)
        _set_time(target, entry.mtime)


def split_path(path: str, *, keeps_up: bool = False) -> list[str]:
    """Return the names of a path inside an image; ``..`` at its root stays there. Raises SandboxFailure for an impossible name."""
    if len(os.fsencode(path)) > MAX_NAME or "\0" in path:
        raise broken(f"the path {path!r:.100} is longer than {MAX_NAME} bytes, or has a zero byte")
    names: list[str] = []
    for name in path.split("/"):
        if name in ("", "."):
            continue
        if name == ".." and not keeps_up:
            names = names[:-1]
        else:
            names.append(name)
    if len(names) > MAX_DEPTH or any(len(os.fsencode(name)) > 255 for name in names):
        raise broken(f"the path {path!r:.100} is deeper than {MAX_DEPTH} folders, or has a name over 255 bytes")
    return names


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_opaque(path: Path) -> bool:
    try:
        return os.getxattr(path, OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False


def _set_time(path: Path, when: float) -> None:
    with suppress(OSError, OverflowError, ValueError):
        os.utime(path, (when, when), follow_symlinks=False)


def _skip(file: io.FileIO, size: int) -> int:
    """Leave a hole, so that a file of zeros takes no space."""
    file.seek(size, os.SEEK_CUR)
    return size
