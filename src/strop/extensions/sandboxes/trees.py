"""Files in and out of a sandbox of any provider, on top of ``put_tree`` and ``get_tree``. What comes out is hostile data."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping

from strop.extensions.sandboxes.base import FailureCause, Sandbox, SandboxFailure


def make_archive(files: Mapping[str, bytes], mode: int = 0o644) -> bytes:
    """Return a tar archive of files by name, owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name.lstrip("/"))
            info.size, info.mode = len(content), mode
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


async def write_files(sandbox: Sandbox, files: Mapping[str, bytes], mode: int = 0o644) -> None:
    """Write files by their absolute paths. Raises SandboxFailure."""
    for path in files:
        if not path.startswith("/"):
            raise SandboxFailure(FailureCause.REQUEST, f"the path {path!r:.200} is not absolute")
    await sandbox.put_tree("/", make_archive(files, mode))


async def read_file(sandbox: Sandbox, path: str, limit_mb: int = 64) -> bytes:
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
        raise SandboxFailure(FailureCause.REQUEST, f"the sandbox sent a damaged archive of {path!r:.200}: {error}") from error
    raise SandboxFailure(FailureCause.REQUEST, f"{path!r:.200} is no file")


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
