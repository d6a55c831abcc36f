"""Where tests write: in memory, if this machine has room. Runs and checkpoints wait for the disk after each of thousands of small files."""

from __future__ import annotations

import os
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM = 6 * 2**30  # bytes; a whole run of the tests holds less than half a GiB at a time


def choose_root(memory: Path = MEMORY, meminfo: Path = Path("/proc/meminfo")) -> Path | None:
    """Return the folder in memory under which pytest makes its folders; None for its own choice, on a disk."""
    try:
        system = os.statvfs(memory)
        available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    can_run_programs = not system.f_flag & os.ST_NOEXEC
    has_room = min(system.f_bavail * system.f_frsize, int(available.split()[1]) * 1024) > ROOM
    return memory if can_run_programs and has_room and os.access(memory, os.W_OK) else None
