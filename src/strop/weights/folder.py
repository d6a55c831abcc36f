"""Weights through a folder that sender and receivers both see: the last resort, which works wherever a checkpoint does.

    FOLDER/CHANNEL/owner.json            who sends: machine and process
    FOLDER/CHANNEL/3.writing/            publish 3 while it is written; then renamed
    FOLDER/CHANNEL/3/manifest.json       its tensors, and in which file each is
    FOLDER/CHANNEL/3/00000.safetensors
    FOLDER/CHANNEL/3/taken_0             receiver 0 has read everything
    FOLDER/CHANNEL/3/refused_1           receiver 1 has not, and why
    FOLDER/CHANNEL/failed_4              publish 4 was given up, and why

A publish is there whole or not at all, because a folder is renamed in one go. It is deleted when all have taken it; what a killed sender
left is deleted by the next one on its machine.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from strop.weights.base import Manifest, NamedTensors, TransportError
from strop.weights.control import alive, machine
from strop.weights.manifest import Bucket, buckets, digest, matched

FILE_SIZE = 1 << 30
TIMEOUT = 600.0
_PERIOD = 0.02  # seconds between looks into the folder


@dataclass(frozen=True)
class FolderAddress:
    """Where the sender writes, as the receivers see it."""

    channel: str
    receivers: int
    timeout: float  # seconds

    def connect(self, index: int, device: torch.device) -> FolderReceiver:
        """Raises TransportError where the folder is not there, ValueError for an index that the sender does not expect."""
        if not 0 <= index < self.receivers:
            raise ValueError(
                f"receiver {index} of {self.receivers}: they are counted from 0; make the sender for as many as there are"
            )
        if not Path(self.channel).is_dir():
            raise TransportError(
                f"there is no sender's folder {self.channel}: it closed, or this machine does not see the folder"
            )
        return FolderReceiver(self, index, device)


class FolderSender:
    """``file_size`` bytes a file, which also is what is held in memory; ``timeout`` seconds for all receivers to take a publish."""

    def __init__(self, folder: Path, receivers: int, *, file_size: int = FILE_SIZE, timeout: float = TIMEOUT) -> None:
        if receivers < 1:
            raise ValueError(f"a channel with {receivers} receivers sends to nobody; there has to be at least one")
        self.receivers, self.file_size, self.timeout = receivers, file_size, timeout
        _remove_orphans(folder)
        self.channel = folder.absolute() / f"channel_{secrets.token_hex(8)}"
        self.channel.mkdir(parents=True)
        _write_whole(self.channel / "owner.json", json.dumps({"machine": machine(), "process": os.getpid()}))
        self.number = 0
        self._closed = threading.Event()
        self._busy = threading.Lock()  # with a publish, or with the end

    @property
    def address(self) -> FolderAddress:
        return FolderAddress(str(self.channel), self.receivers, self.timeout)

    @torch.no_grad()
    def send(self, manifest: Manifest, tensors: NamedTensors) -> None:
        with self._busy:
            self.number += 1
            whole, partial = self.channel / str(self.number), self.channel / f"{self.number}.writing"
            try:
                self._refuse_closed()
                self._write(partial, manifest, tensors)
                partial.rename(whole)
                self._wait(whole)
            except BaseException as error:
                with suppress(OSError):  # the folder may be why
                    _write_whole(self.channel / f"failed_{self.number}", f"{type(error).__name__}: {error}")
                raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)
                shutil.rmtree(whole, ignore_errors=True)

    def _refuse_closed(self) -> None:
        if self._closed.is_set():
            raise TransportError(f"publish {self.number} ended early: the channel was closed")

    def _write(self, folder: Path, manifest: Manifest, tensors: NamedTensors) -> None:
        folder.mkdir()
        given = matched(manifest, tensors)
        cut = buckets(manifest, self.file_size)
        for number, bucket in enumerate(cut):
            _write_file(folder / _file(number), bucket, given)
        next(given, None)  # raises where there is a tensor too many
        files = {placed.entry.name: _file(number) for number, bucket in enumerate(cut) for placed in bucket.tensors}
        (folder / "manifest.json").write_text(json.dumps({"digest": digest(manifest), "files": files}))

    def _wait(self, folder: Path) -> None:
        def missing() -> list[int]:
            self._refuse_closed()
            for index in range(self.receivers):
                if (refusal := folder / f"refused_{index}").exists():
                    raise TransportError(f"publish {self.number} ended early: receiver {index}: {refusal.read_text()}")
            return [index for index in range(self.receivers) if not (folder / f"taken_{index}").exists()]

        if not _until(lambda: not missing(), self.timeout):
            names = ", ".join(map(str, missing()))
            raise TransportError(f"receiver {names} of {self.receivers} did not take {folder} within {self.timeout:g} s")

    def close(self) -> None:
        """From any thread: a publish in another one ends first, with a TransportError."""
        self._closed.set()
        with self._busy:
            shutil.rmtree(self.channel, ignore_errors=True)


class FolderReceiver:
    """Reads file by file, tensor by tensor."""

    def __init__(self, address: FolderAddress, index: int, device: torch.device) -> None:
        self.channel, self.timeout, self.index, self.device = Path(address.channel), address.timeout, index, device
        self._taken = max(self._published(), default=0) if self._has_taken_the_newest() else 0

    def receive(self, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        number = self._await()
        folder = self.channel / str(number)
        try:
            yield from self._read(folder, manifest)
            (folder / f"taken_{self.index}").touch()
        except OSError as error:
            raise TransportError(f"{folder} went away while it was read ({error}): the sender gave it up or closed") from error
        except BaseException as error:  # also where the reader reads no further
            with suppress(OSError):
                reason = "its reader stopped" if isinstance(error, GeneratorExit) else str(error)
                _write_whole(folder / f"refused_{self.index}", reason)
            self._taken = number
            raise
        self._taken = number

    def _await(self) -> int:
        """The newest publish that was not taken yet. Raises TransportError where none comes."""
        failed = self._failures()
        found: list[int] = []

        def arrived() -> bool:
            found[:] = [number for number in self._published() if number > self._taken]
            if not found and (new := self._failures() - failed):
                number = max(new)
                raise TransportError(f"the sender gave publish {number} up: {(self.channel / f'failed_{number}').read_text()}")
            if not found and not _owner_lives(self.channel):
                raise TransportError(f"the sender of {self.channel} went away: it closed the channel, ended or was killed")
            return bool(found)

        if not _until(arrived, self.timeout):
            raise TransportError(f"the sender of {self.channel} did not publish anything within {self.timeout:g} s")
        return max(found)

    def _read(self, folder: Path, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        from safetensors import SafetensorError, safe_open

        written = json.loads((folder / "manifest.json").read_text())
        if written["digest"] != digest(manifest):
            raise TransportError(f"its manifest is not that of {folder}: both sides have to be given the same one")
        for name in dict.fromkeys(written["files"].values()):
            try:
                with safe_open(folder / name, framework="pt", device=str(self.device)) as file:
                    for entry in manifest.entries:
                        if written["files"][entry.name] == name:
                            yield entry.name, file.get_tensor(entry.name)
            except SafetensorError as error:
                raise TransportError(f"{folder / name} cannot be read ({error}): has the folder room for the weights?") from error

    def _published(self) -> set[int]:
        return {int(path.name) for path in _listed(self.channel) if path.name.isdecimal()}

    def _failures(self) -> set[int]:
        return {int(path.name.removeprefix("failed_")) for path in _listed(self.channel) if path.name.startswith("failed_")}

    def _has_taken_the_newest(self) -> bool:
        """A receiver that was restarted does not read again what its predecessor took."""
        return any((self.channel / str(number) / f"taken_{self.index}").exists() for number in self._published())

    def close(self) -> None:
        return


def _write_file(path: Path, bucket: Bucket, given: Iterator[tuple[object, Tensor]]) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for placed in bucket.tensors:
        entry = placed.entry
        tensors[entry.name] = torch.empty(entry.shape, dtype=entry.dtype).copy_(next(given)[1].detach())
    save_file(tensors, path)


def _file(number: int) -> str:
    return f"{number:05}.safetensors"


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".writing")
    partial.write_text(text)
    partial.rename(path)


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # the sender closed
        return []


def _until(condition: Callable[[], bool], timeout: float) -> bool:
    until = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(_PERIOD)
    return True


def _owner_lives(channel: Path) -> bool:
    """Whether the sender may still be there: a process of another machine always may, as long as its folder is."""
    try:
        owner = json.loads((channel / "owner.json").read_text())
    except FileNotFoundError:
        return False
    return owner["machine"] != machine() or alive(owner["process"])


def _remove_orphans(folder: Path) -> None:
    """Folders of senders of this machine that were killed."""
    for channel in _listed(folder):
        if channel.name.startswith("channel_") and (channel / "owner.json").exists() and not _owner_lives(channel):
            shutil.rmtree(channel, ignore_errors=True)
