"""Weight transport through a shared folder: the slowest transport, which works wherever checkpoints do.

    FOLDER/CHANNEL/owner.json            the sender: machine and process
    FOLDER/CHANNEL/3.writing/            publish 3 while it is written; then renamed
    FOLDER/CHANNEL/3/manifest.json       its tensors and the file of each
    FOLDER/CHANNEL/3/00000.safetensors
    FOLDER/CHANNEL/3/taken_0             receiver 0 has read everything
    FOLDER/CHANNEL/3/refused_1           receiver 1 failed, and why
    FOLDER/CHANNEL/failed_4              publish 4 was aborted, and why

A publish appears atomically, by renaming its folder. It is deleted after all receivers have read it; the folders of a killed sender are
deleted by the next sender on its machine.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from strop.weight_sync.base import Manifest, NamedTensors, TransportError
from strop.weight_sync.transports.choose import SenderFactory, SenderSetup
from strop.weight_sync.transports.connection import is_process_alive, machine_id
from strop.weight_sync.transports.manifest import Bucket, manifest_digest, match_tensors, split_into_buckets

FILE_SIZE = 1 << 30
TIMEOUT = 600.0
_POLL_SECONDS = 0.02  # seconds between polls of the folder


@dataclass(frozen=True)
class FolderAddress:
    """Path of the sender's folder, as receivers see it."""

    channel: str
    receivers: int
    timeout: float  # seconds

    def connect(self, index: int, device: torch.device) -> FolderReceiver:
        """Raises TransportError if the folder does not exist, ValueError if ``index`` is out of range."""
        if not 0 <= index < self.receivers:
            raise ValueError(
                f"receiver {index} of {self.receivers}: indices start at 0; create the sender with the number of receivers"
            )
        if not Path(self.channel).is_dir():
            raise TransportError(
                f"there is no sender's folder {self.channel}: the sender closed, or the folder is not visible on this machine"
            )
        return FolderReceiver(self, index, device)


class FolderSender:
    """Writes files of up to ``file_size`` bytes, each assembled in memory first.

    Receivers have ``timeout`` seconds to read a publish.
    """

    def __init__(self, folder: Path, receivers: int, *, file_size: int = FILE_SIZE, timeout: float = TIMEOUT) -> None:
        if receivers < 1:
            raise ValueError(f"found {receivers} receivers; a sender needs at least one")
        self.receivers, self.file_size, self.timeout = receivers, file_size, timeout
        _remove_orphans(folder)
        self.channel = folder.absolute() / f"channel_{secrets.token_hex(8)}"
        self.channel.mkdir(mode=0o700, parents=True)  # readable only by this user's processes
        _write_atomically(self.channel / "owner.json", json.dumps({"machine": machine_id(), "process": os.getpid()}))
        self.number = 0
        self._closed = threading.Event()
        self._busy = threading.Lock()  # held during a publish and while closing

    @property
    def address(self) -> FolderAddress:
        return FolderAddress(str(self.channel), self.receivers, self.timeout)

    @torch.no_grad()
    def send(self, manifest: Manifest, tensors: NamedTensors) -> None:
        with self._busy:
            self.number += 1
            final, partial = self.channel / str(self.number), self.channel / f"{self.number}.writing"
            try:
                self._check_open()
                self._write(partial, manifest, tensors)
                partial.rename(final)
                self._wait_for_receivers(final)
            except BaseException as error:
                with suppress(OSError):  # the folder may be the cause of the error
                    _write_atomically(self.channel / f"failed_{self.number}", f"{type(error).__name__}: {error}")
                raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)
                shutil.rmtree(final, ignore_errors=True)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise TransportError(f"publish {self.number} ended early: the channel was closed")

    def _write(self, folder: Path, manifest: Manifest, tensors: NamedTensors) -> None:
        folder.mkdir()
        matched = match_tensors(manifest, tensors)
        buckets = split_into_buckets(manifest, self.file_size)
        for number, bucket in enumerate(buckets):
            _write_file(folder / _file_name(number), bucket, matched)
        next(matched, None)  # raises if there are more tensors than in the manifest
        files = {item.entry.name: _file_name(number) for number, bucket in enumerate(buckets) for item in bucket.tensors}
        (folder / "manifest.json").write_text(json.dumps({"digest": manifest_digest(manifest), "files": files}))

    def _wait_for_receivers(self, folder: Path) -> None:
        def missing() -> list[int]:
            self._check_open()
            for index in range(self.receivers):
                if (refusal := folder / f"refused_{index}").exists():
                    raise TransportError(f"publish {self.number} ended early: receiver {index}: {refusal.read_text()}")
            return [index for index in range(self.receivers) if not (folder / f"taken_{index}").exists()]

        if not _wait_until(lambda: not missing(), self.timeout):
            names = ", ".join(map(str, missing()))
            raise TransportError(f"receiver {names} of {self.receivers} did not read {folder} within {self.timeout:g} s")

    def close(self) -> None:
        """Close from any thread. A publish in progress in another thread fails first, with a TransportError."""
        self._closed.set()
        with self._busy:
            shutil.rmtree(self.channel, ignore_errors=True)


class FolderReceiver:
    """Reads a publish file by file, tensor by tensor."""

    def __init__(self, address: FolderAddress, index: int, device: torch.device) -> None:
        self.channel, self.timeout, self.index, self.device = Path(address.channel), address.timeout, index, device
        self._taken = max(self._list_publishes(), default=0) if self._has_taken_newest() else 0

    def receive(self, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        number = self._wait_for_publish()
        folder = self.channel / str(number)
        try:
            yield from self._read(folder, manifest)
            (folder / f"taken_{self.index}").touch()
        except OSError as error:
            raise TransportError(f"{folder} went away while it was read ({error}): the sender aborted or closed") from error
        except BaseException as error:  # also GeneratorExit, if the caller stops iterating
            with suppress(OSError):
                reason = "its reader stopped" if isinstance(error, GeneratorExit) else str(error)
                _write_atomically(folder / f"refused_{self.index}", reason)
            self._taken = number
            raise
        self._taken = number

    def _wait_for_publish(self) -> int:
        """Wait for the newest unread publish. Raises TransportError if none appears."""
        failed = self._list_failures()
        unread: list[int] = []

        def arrived() -> bool:
            unread[:] = [number for number in self._list_publishes() if number > self._taken]
            if not unread and (new := self._list_failures() - failed):
                number = max(new)
                raise TransportError(f"the sender aborted publish {number}: {(self.channel / f'failed_{number}').read_text()}")
            if not unread and not _is_owner_alive(self.channel):
                raise TransportError(f"the sender of {self.channel} went away: it closed the channel, exited or was killed")
            return bool(unread)

        if not _wait_until(arrived, self.timeout):
            raise TransportError(f"the sender of {self.channel} did not publish anything within {self.timeout:g} s")
        return max(unread)

    def _read(self, folder: Path, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        from safetensors import SafetensorError, safe_open

        index = json.loads((folder / "manifest.json").read_text())
        if index["digest"] != manifest_digest(manifest):
            raise TransportError(f"its manifest is not that of {folder}: pass the same manifest on both sides")
        for name in dict.fromkeys(index["files"].values()):
            try:
                with safe_open(folder / name, framework="pt", device=str(self.device)) as file:
                    for entry in manifest.entries:
                        if index["files"][entry.name] == name:
                            yield entry.name, file.get_tensor(entry.name)
            except SafetensorError as error:
                raise TransportError(
                    f"{folder / name} cannot be read ({error}): check that the disk has room for the weights"
                ) from error

    def _list_publishes(self) -> set[int]:
        return {int(path.name) for path in _list_directory(self.channel) if path.name.isdecimal()}

    def _list_failures(self) -> set[int]:
        return {
            int(path.name.removeprefix("failed_")) for path in _list_directory(self.channel) if path.name.startswith("failed_")
        }

    def _has_taken_newest(self) -> bool:
        """Whether the newest publish was already read, by the predecessor of a restarted receiver."""
        return any((self.channel / str(number) / f"taken_{self.index}").exists() for number in self._list_publishes())

    def close(self) -> None:
        return


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors by name as a safetensors file."""
    from safetensors.torch import save_file

    save_file(dict(tensors), path)


def _write_file(path: Path, bucket: Bucket, matched: Iterator[tuple[object, Tensor]]) -> None:
    tensors: dict[str, Tensor] = {}
    for item in bucket.tensors:
        entry = item.entry
        tensors[entry.name] = torch.empty(entry.shape, dtype=entry.dtype).copy_(next(matched)[1].detach())
    save_tensors(tensors, path)


def _file_name(number: int) -> str:
    return f"{number:05}.safetensors"


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".writing")
    partial.write_text(text)
    partial.rename(path)


def _list_directory(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # the sender closed
        return []


def _wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _is_owner_alive(channel: Path) -> bool:
    """Return whether the sender may still be alive. On another machine, it is assumed alive as long as its folder exists."""
    try:
        owner = json.loads((channel / "owner.json").read_text())
    except FileNotFoundError:
        return False
    return owner["machine"] != machine_id() or is_process_alive(owner["process"])


def _remove_orphans(folder: Path) -> None:
    """Remove the folders of killed senders of this machine."""
    for channel in _list_directory(folder):
        if channel.name.startswith("channel_") and (channel / "owner.json").exists() and not _is_owner_alive(channel):
            shutil.rmtree(channel, ignore_errors=True)


def make_senders(setup: SenderSetup) -> SenderFactory:
    folder = Path(setup.config.folder) if setup.config.folder else setup.folder
    return lambda receivers: FolderSender(folder, receivers, timeout=setup.config.timeout_seconds)
