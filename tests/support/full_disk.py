"""A folder whose disk is full while a test says so."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


class FullDisk:
    """Makes flushing and writing files under ``folder`` raise ENOSPC while ``full``, after half of what is written."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.full = folder.resolve(), False
        self._write, self._fsync = os.write, os.fsync
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def write(self, descriptor: int, content: Any) -> int:
        if self._refuses(descriptor):
            self._write(descriptor, bytes(content)[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(descriptor, content)

    def fsync(self, descriptor: int) -> None:
        if self._refuses(descriptor):
            raise OSError(errno.ENOSPC, "No space left on device")
        self._fsync(descriptor)

    def _refuses(self, descriptor: int) -> bool:
        return self.full and Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(self.folder)
