"""Unpacked images on this machine, shared by all runs of a user, with a bound on the disk they take.

FOLDER/images/KEY.json     a reference: its layers from the lowest to the highest, its configuration
FOLDER/layers/KEY/fs       a layer, unpacked on top of those below it, which KEY names too
FOLDER/layers/KEY.json     its size; the time of this file is that of its last use
FOLDER/layers/KEY.lock     held shared (flock) while a sandbox uses the layer, so that no run removes it; a killed run holds none
FOLDER/new/PID-...         being written; removed by the next run if its process is gone
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from strop.extensions.sandboxes.images.layers import LayerLimits, Owners, Unpacked, broken, unpack_layer
from strop.extensions.sandboxes.images.registry import RegistrySource
from strop.extensions.sandboxes.images.sources import Blob, ImageConfig, ImageSource, LocalSource, MachineSource

FORMAT = "1"  # of unpacked layers; a change makes the old ones unused
SNAPSHOT = "snapshot:"


@dataclass(frozen=True)
class UnpackedImage:
    """An image that is in use, until it is released. ``layers``: folders, the lowest first."""

    reference: str
    layers: tuple[Path, ...]
    config: ImageConfig
    locks: tuple[int, ...] = field(repr=False)

    def release(self) -> None:
        for descriptor in self.locks:
            with suppress(OSError):
                os.close(descriptor)


class ImageStore:
    """Gets images by reference. Its methods block, and may be called from any thread."""

    def __init__(self, folder: Path, *, limit_mb: int, limits: LayerLimits, owners: Owners) -> None:
        self.folder, self.limit_mb, self.limits, self.owners = folder, limit_mb, limits, owners
        self._busy: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        for name in ("images", "layers", "new"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        folder.chmod(0o711)  # others may not list it; the users of sandboxes pass through it
        self._remove_left_over()

    def get(self, reference: str, *, fresh: bool = False) -> UnpackedImage:
        """Return an image, pulled and unpacked if it is not here. ``fresh``: ask the source again. Raises SandboxFailure."""
        with self._lock:
            busy = self._busy.setdefault(reference, threading.Lock())
        with busy:  # many sandboxes of one image wait for one pull
            if not fresh and (found := self._find(reference)) is not None:
                return found
            if reference.startswith(SNAPSHOT):
                raise broken(f"there is no {reference}; it was removed, or made on another machine")
            return self._unpack(reference, find_source(reference))

    def add_snapshot(self, base: UnpackedImage, layer: IO[bytes]) -> str:
        """Put a layer, as OCI writes it, on top of an image. Return the reference of the result."""
        reference = f"{SNAPSHOT}{secrets.token_hex(12)}"  # not by its content, so that each is removed on its own
        done, keys = Unpacked(self.limits), [path.parent.name for path in base.layers]
        keys.append(self._add_layer(keys, Blob.of(layer), layer, done))
        self._write_image(reference, keys, base.config)
        return reference

    def remove_snapshot(self, reference: str) -> None:
        """Remove a snapshot, and its layer if nothing else needs it."""
        note = self._image_note(reference)
        with suppress(OSError, ValueError, KeyError, IndexError):
            key = json.loads(note.read_text())["layers"][-1]
            note.unlink()
            if not any(key in other.read_text() for other in note.parent.glob("*.json")):
                with self._holding_alone(key) as alone:
                    if alone:
                        self._remove_layer(key)

    def _remove_layer(self, key: str) -> None:
        self._note(key).unlink(missing_ok=True)
        shutil.rmtree(self.folder / "layers" / key, ignore_errors=True)

    def _unpack(self, reference: str, source: ImageSource) -> UnpackedImage:
        manifest = source.read_manifest()
        done, keys, locks = Unpacked(self.limits), list[str](), list[int]()
        try:
            for blob in manifest.layers:
                key = self._key(keys, blob)
                locks.append(self._hold(key))
                if not self._has(key):
                    with source.open_layer(blob, (self.limits.total_mb << 20) - done.size) as file:
                        self._add_layer(keys, blob, file, done)
                keys.append(key)
            self._write_image(reference, keys, manifest.config)
            self._evict()
        except BaseException:
            for descriptor in locks:
                os.close(descriptor)
            raise
        return UnpackedImage(reference, self._folders(keys), manifest.config, tuple(locks))

    def _add_layer(self, below: list[str], blob: Blob, file: IO[bytes], done: Unpacked) -> str:
        key = self._key(below, blob)
        if self._has(key):
            return key
        before = done.size
        new = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=self.folder / "new"))
        try:
            unpack_layer(file, new / "fs", self._folders(below[::-1]), self.owners, done, blob.media_type)
            new.chmod(0o711)
            with suppress(OSError):  # another run was faster
                os.rename(new, self.folder / "layers" / key)
            self._write(self._note(key), {"mb": (done.size - before) >> 20, "left_out": done.dropped})
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return key

    def _find(self, reference: str) -> UnpackedImage | None:
        try:
            values = json.loads(self._image_note(reference).read_text())
            config, keys = ImageConfig(**values["config"]), [str(each) for each in values["layers"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        locks = [self._hold(key) for key in keys]
        if not all(self._has(key) for key in keys):  # some were removed to make room
            for descriptor in locks:
                os.close(descriptor)
            return None
        for key in keys:
            with suppress(OSError):
                os.utime(self._note(key))
        return UnpackedImage(reference, self._folders(keys), config, tuple(locks))

    def _evict(self) -> None:
        """Remove layers that are not in use, the longest unused first, until the rest fit."""
        sizes = {}
        for note in (self.folder / "layers").glob("*.json"):
            with suppress(OSError, ValueError, KeyError):
                sizes[note.stem] = (note.stat().st_mtime, int(json.loads(note.read_text())["mb"]))
        total = sum(size for _, size in sizes.values())
        for key, (_, size) in sorted(sizes.items(), key=lambda item: item[1][0]):
            if total <= self.limit_mb:
                return
            with self._holding_alone(key) as alone:
                if alone:
                    self._remove_layer(key)
                    total -= size

    def _remove_left_over(self) -> None:
        for path in (self.folder / "new").iterdir():
            if not Path("/proc", path.name.partition("-")[0]).exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def _hold(self, key: str) -> int:
        descriptor = os.open(self.folder / "layers" / f"{key}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return descriptor

    @contextmanager
    def _holding_alone(self, key: str) -> Iterator[bool]:
        descriptor = os.open(self.folder / "layers" / f"{key}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
        except BlockingIOError:
            yield False
        finally:
            os.close(descriptor)

    def _has(self, key: str) -> bool:
        return self._note(key).exists() and (self.folder / "layers" / key).is_dir()

    def _note(self, key: str) -> Path:
        return self.folder / "layers" / f"{key}.json"

    def _image_note(self, reference: str) -> Path:
        return self.folder / "images" / f"{hashlib.sha256(f'{reference} {self.owners.base}'.encode()).hexdigest()[:32]}.json"

    def _write_image(self, reference: str, keys: list[str], config: ImageConfig) -> None:
        self._write(self._image_note(reference), {"reference": reference, "layers": keys, "config": asdict(config)})

    def _write(self, note: Path, values: Mapping[str, object]) -> None:
        descriptor, name = tempfile.mkstemp(prefix=f"{os.getpid()}-", dir=self.folder / "new")  # several runs may write one note
        with open(descriptor, "w") as file:
            json.dump(values, file)
        os.replace(name, note)

    def _folders(self, keys: list[str]) -> tuple[Path, ...]:
        return tuple(self.folder / "layers" / key / "fs" for key in keys)

    def _key(self, below: list[str], blob: Blob) -> str:
        """A layer is unpacked on top of others, whose links and folders its paths lead through: they are part of what it is."""
        text = "\n".join((FORMAT, str(self.owners.base), *below[-1:], blob.digest))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def find_source(reference: str) -> ImageSource:
    """Return the source that a reference names. Raises SandboxFailure."""
    kind, _, rest = reference.partition(":")
    if kind == "machine":
        return MachineSource()
    if kind not in ("oci", "oci-archive", "docker-archive"):
        return RegistrySource(reference)
    path, _, tag = rest.partition(":")
    if not Path(path).exists():
        raise broken(f"there is no {path}")
    return LocalSource(Path(path), tag)
