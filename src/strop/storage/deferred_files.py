"""Files that wait in memory while a disk is full."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from strop.storage.atomic_file import atomic_write
from strop.storage.rescue import rescue_files
from strop.storage.storage_error import find_refusal, format_bytes, free_bytes

log = logging.getLogger(__name__)

LARGEST_BACKLOG = 1 << 28  # bytes held in memory


class DeferredFiles:
    """Writes whole files atomically. What the file system refuses is kept in memory, and written in order at a later call.

    Other errors are raised. Beyond ``largest`` bytes the oldest files are given up, with a warning that names them.
    """

    def __init__(self, what: str, largest: int = LARGEST_BACKLOG) -> None:
        self.what = what  # for warnings, such as "rollouts"
        self.largest = largest
        self._waiting: dict[Path, bytes] = {}

    @property
    def waiting(self) -> tuple[Path, ...]:
        return tuple(self._waiting)

    def write(self, path: Path, content: bytes) -> bool:
        """Write a file after those that wait. Return whether it is on disk."""
        outage = bool(self._waiting)
        self._waiting.pop(path, None)
        self._waiting[path] = content
        return self._write_waiting(outage)

    def flush(self) -> bool:
        """Try again to write what waits. Return whether nothing waits any more."""
        return not self._waiting or self._write_waiting(outage=True)

    def discard(self, condition: Callable[[Path], bool]) -> None:
        """Forget the waiting files for which ``condition`` holds."""
        self._waiting = {path: content for path, content in self._waiting.items() if not condition(path)}

    def close(self) -> None:
        """Try a last time, and warn of what is lost, or is among the temporary files."""
        if not self.flush():
            rescued = rescue_files({path.name: content for path, content in self._waiting.items()})
            where = "are lost" if rescued is None else f"are in {rescued}"
            log.warning("%s that could not be written %s: %s", self.what, where, self._names(self.waiting))
            self._waiting.clear()

    def _write_waiting(self, outage: bool) -> bool:
        count = len(self._waiting)
        for path in tuple(self._waiting):
            try:
                with atomic_write(path) as temporary:
                    temporary.write_bytes(self._waiting[path])
            except OSError as error:
                reason = find_refusal(error, path.parent)
                if reason is None:
                    del self._waiting[path]
                    raise
                if not outage:
                    log.warning(
                        "%s cannot be written to %s: %s (%s free). They are kept in memory and written when there is room",
                        self.what,
                        path.parent,
                        reason,
                        format_bytes(free_bytes(path.parent)),
                    )
                self._limit()
                return False
            del self._waiting[path]
        if outage:
            log.warning("%s are written again: %d files that had to wait are on disk", self.what, count)
        return True

    def _limit(self) -> None:
        dropped, size = [], sum(map(len, self._waiting.values()))
        for path in tuple(self._waiting)[:-1]:
            if size <= self.largest:
                break
            size -= len(self._waiting.pop(path))
            dropped.append(path)
        if dropped:
            log.warning(
                "more than %s of %s wait for room; given up: %s", format_bytes(self.largest), self.what, self._names(dropped)
            )

    @staticmethod
    def _names(paths: tuple[Path, ...] | list[Path]) -> str:
        names = [path.name for path in paths]
        return ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]} ({len(names)} files)"
