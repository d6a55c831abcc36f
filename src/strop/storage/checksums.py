"""Sizes and checksums of files, to find one that is missing, truncated or changed, and digests of the contents behind a name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from strop.storage.files import atomic_write, user_cache_folder

_CHUNK = 1 << 22
_OWN = "/checksum"  # key of the list's own checksum; no file is called that
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class FileChecksum:
    """The size of a file in bytes and its XXH3 checksum (128 bits, hexadecimal); None in checkpoints of earlier versions."""

    bytes: int
    xxh3: str | None = None


def compute_checksums(folder: Path, entries: Iterable[str]) -> dict[str, FileChecksum]:
    """Return the checksums of all files in ``entries`` (files or folders), by path relative to ``folder``."""
    paths = sorted(path for entry in entries for path in _files(folder / entry))
    with ThreadPoolExecutor(THREADS) as threads:
        return {
            str(path.relative_to(folder)): sums for path, sums in zip(paths, threads.map(compute_checksum, paths), strict=True)
        }


def find_damage(folder: Path, saved: Mapping[str, FileChecksum]) -> str | None:
    """Return what is wrong with the first file that differs from when it was saved, or None."""
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda item: _compare(folder / item[0], item[1]), sorted(saved.items()))
        return next((damage for damage in found if damage is not None), None)


def encode_checksums(sums: Mapping[str, FileChecksum], facts: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the checksums and other facts (with names that begin with a slash) as JSON values, including their own checksum."""
    values: dict[str, Any] = {name: asdict(checksum) for name, checksum in sums.items()} | dict(facts or {})
    return {**values, _OWN: _digest_of(values)}


def decode_checksums(values: Any) -> dict[str, FileChecksum]:
    """Return checksums from JSON values; a plain number is a size. Raises ValueError for anything else."""
    if isinstance(values, dict) and _OWN in values:
        values, own = {name: value for name, value in values.items() if name != _OWN}, values[_OWN]
        if _digest_of(values) != own:
            raise ValueError("the list of files has changed since it was saved")
    try:
        return {
            str(name): FileChecksum(value) if isinstance(value, int) else FileChecksum(int(value["bytes"]), str(value["xxh3"]))
            for name, value in values.items()
            if not name.startswith("/")
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"expected sizes and checksums of files by name ({type(error).__name__}: {error})") from None


def _digest_of(values: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _files(entry: Path) -> list[Path]:
    return [path for path in entry.rglob("*") if path.is_file()] if entry.is_dir() else [entry] if entry.is_file() else []


def compute_checksum(path: Path) -> FileChecksum:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK))
        size = 0
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileChecksum(size, digest.hexdigest())


def _compare(path: Path, saved: FileChecksum) -> str | None:
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != saved.bytes:
        return f"{path} has {size} bytes, and {saved.bytes} were saved"
    if saved.xxh3 is not None and compute_checksum(path).xxh3 != saved.xxh3:
        return f"{path} is damaged: its checksum differs from when it was saved"
    return None


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
