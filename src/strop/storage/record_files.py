"""Record files of a run; a full disk does not end the run."""

from __future__ import annotations

import logging
from pathlib import Path

from strop.storage.atomic_file import atomic_write
from strop.storage.storage_error import find_refusal, format_bytes, free_bytes

log = logging.getLogger(__name__)


class RecordFiles:
    """Writes whole files atomically. Refused writes are lost, with a warning. Other errors are raised."""

    def __init__(self, what: str) -> None:
        self.what = what  # for warnings, such as "rollouts"
        self._lost = 0  # files, since the last successful write

    def write(self, path: Path, content: bytes) -> bool:
        """Write a file. Return whether it is on disk."""
        try:
            with atomic_write(path) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            reason = find_refusal(error, path.parent)
            if reason is None:
                raise
            self._lost += 1
            if self._lost == 1:
                free = format_bytes(free_bytes(path.parent))
                log.warning(
                    "%s cannot be written to %s: %s (%s free). %s and later ones are lost until there is room",
                    self.what, path.parent, reason, free, path.name,
                )  # fmt: skip
            return False
        if self._lost:
            log.warning("%s are written again, from %s on: %d files before it are lost", self.what, path.name, self._lost)
        self._lost = 0
        return True
