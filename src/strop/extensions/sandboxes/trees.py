"""Files in and out of a sandbox of any provider, on top of ``put_tree`` and ``get_tree``. What comes out is hostile data."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from strop.extensions.sandboxes.base import FailureCause, SandboxFailure


class HasTrees(Protocol):
    """A sandbox, as far as files are concerned."""

    async def put_tree(self, path: str, archive: bytes) -> None: ...
    async def get_tree(self, path: str, limit_mb: int = 64) -> bytes: ...


def make_archive(files: Mapping[str, bytes], mode: int = 0o644) -> bytes:
    """Return a tar archive of files by name, owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name.lstrip("/"))
            info.size, info.mode = len(content), mode
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


async def write_files(sandbox: HasTrees, files: Mapping[str, bytes], mode: int = 0o644) -> None:
    """Write files by their absolute paths. Raises SandboxFailure."""
    for path in files:
        if not path.startswith("/"):
            raise SandboxFailure(FailureCause.REQUEST, f"the path {path!r:.200} is not absolute")
    await sandbox.put_tree("/", make_archive(files, mode))


async def read_file(sandbox: HasTrees, path: str, limit_mb: int = 64) -> bytes:
    """Return the content of a file. Raises SandboxFailure, with the cause ``request`` if it is none or too large."""
    return read_archive(await sandbox.get_tree(path, limit_mb), path)


def read_archive(archive: bytes, path: str) -> bytes:
    """Return the content of the one file in an archive. Raises SandboxFailure."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
            entry = opened.next()
            file = opened.extractfile(entry) if entry is not None and entry.isreg() else None
            if file is not None:
                return file.read()
    except (tarfile.TarError, KeyError, OSError) as error:
        raise SandboxFailure(FailureCause.LOST, f"the sandbox sent a damaged archive of {path!r:.200}: {error}") from error
    raise SandboxFailure(FailureCause.REQUEST, f"{path!r:.200} is no file")


async def upload(sandbox: HasTrees, folder: Path, path: str) -> None:
    """Copy a folder of this machine into the sandbox, at ``path``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for each in sorted(folder.iterdir()):
            archive.add(each, each.name, filter=_as_root)
    await sandbox.put_tree(path, buffer.getvalue())


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


async def download(sandbox: HasTrees, path: str, folder: Path, limit_mb: int = 64) -> None:
    """Copy a file or a folder of the sandbox into a folder of this machine: regular files, folders, and links that stay inside."""
    with tarfile.open(fileobj=io.BytesIO(await sandbox.get_tree(path, limit_mb)), mode="r:") as archive:
        try:
            archive.extractall(folder, filter="data")
        except tarfile.FilterError as error:
            raise SandboxFailure(FailureCause.REQUEST, f"{path!r:.200} cannot be copied to this machine: {error}") from error


def check_tree(archive: bytes, top: str) -> bytes:
    """Return an archive of a sandbox's folder ``top`` if it unpacks into that folder only. Raises SandboxFailure.

    The sandbox may have made it with a program that the policy wrote, to change files of the sandbox that it is unpacked in.
    """
    links: set[str] = set()

    def check(name: str) -> None:
        parts = name.rstrip("/").split("/")
        inside = parts[0] == top and not {"..", ".", ""} & set(parts)
        if not inside or any("/".join(parts[:length]) in links for length in range(1, len(parts))):
            raise SandboxFailure(
                FailureCause.REQUEST, f"the archive of {top!r:.100} has the path {name!r:.200}, which leads out of it"
            )

    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
            for entry in opened:
                check(entry.name)
                if entry.islnk():
                    check(entry.linkname)
                if entry.islnk() and entry.linkname.rstrip("/") in links:
                    raise SandboxFailure(
                        FailureCause.REQUEST, f"the archive of {top!r:.100} links to the link {entry.linkname!r:.200}"
                    )
                if entry.issym():
                    links.add(entry.name.rstrip("/"))
    except tarfile.TarError as error:
        raise SandboxFailure(FailureCause.REQUEST, f"the archive of {top!r:.100} is damaged: {error}") from error
    return archive
