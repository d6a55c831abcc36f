"""Digests of the contents of files and folders, cached for large files.

All bytes are read: a checksum of sizes and samples would miss one row of an embedding, or one answer in the middle of a file.
XXH3 is as fast as the disk, and the run then reads the same bytes from the page cache. The digest of a file of more than
``SMALL_BYTES`` is kept in the user's cache under its path, size, inode and both times (of modification and of the last status
change, which programs cannot set), so that each state of a file is read only once on a machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import xxhash

from strop.storage.atomic_file import atomic_write
from strop.storage.checksums import THREADS, compute_checksum
from strop.storage.user_cache import user_cache_folder

SMALL_BYTES = 16 << 20  # read each time
CACHED_FILES = 4096
END_BYTES = 8 << 20
_CACHE = "contents.json"
_Key = tuple[int, int, int, int]


def digest_files(files: Iterable[Path], root: Path | None = None) -> str:
    """Return a digest of files: of their contents, and of their names relative to ``root`` if it is given. Raises OSError."""
    paths = sorted(path.resolve() for path in files)
    cache = _read_cache()
    keys = {path: _key_of(path) for path in paths}
    known = {path: cache[str(path)][1] for path in paths if cache.get(str(path), ((), ""))[0] == keys[path]}
    unread = [path for path in paths if path not in known]
    with ThreadPoolExecutor(THREADS) as threads:
        known |= dict(zip(unread, (str(each.xxh3) for each in threads.map(compute_checksum, unread)), strict=True))
    if large := {str(path): (keys[path], known[path]) for path in unread if keys[path][0] > SMALL_BYTES}:
        _write_cache({**cache, **large})
    if root is None and len(paths) == 1:
        return known[paths[0]][:16]
    base = None if root is None else root.resolve()
    names = [path.name if base is None or not path.is_relative_to(base) else str(path.relative_to(base)) for path in paths]
    listed = sorted(zip(names, (known[path] for path in paths), strict=True))
    return xxhash.xxh3_128(json.dumps(listed).encode()).hexdigest()[:16]


def digest_ends(files: Iterable[Path]) -> str:
    """Return a digest of the sizes and both ends of files that are too many or too large to read before a run. Raises OSError."""
    digest = xxhash.xxh3_128()
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(END_BYTES))
            file.seek(max(0, size - END_BYTES))
            digest.update(file.read(END_BYTES))
    return digest.hexdigest()[:16]


def _key_of(path: Path) -> _Key:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _read_cache() -> dict[str, tuple[_Key, str]]:
    try:
        saved = json.loads((user_cache_folder() / _CACHE).read_bytes())
        found: dict[str, tuple[_Key, str]] = {path: (tuple(key), str(digest)) for path, (key, digest) in saved.items()}
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError):  # without xattr support, everything is read
        return {}
    return found


def _write_cache(cache: dict[str, tuple[_Key, str]]) -> None:
    newest = dict(list(cache.items())[-CACHED_FILES:])
    with suppress(OSError, RuntimeError):  # the cache only saves time
        folder = user_cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / _CACHE) as draft:
            draft.write_text(json.dumps(newest))
