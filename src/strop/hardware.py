"""How much memory a machine has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # of cgroups 2 and 1
_RECLAIMED = (
    "inactive_file ",
    "total_inactive_file ",
)  # lines of memory.stat: file pages, which the kernel drops if needed


@dataclass(frozen=True)
class GroupLimit:
    """The limit of a control group."""

    most: int  # bytes
    left: int  # bytes that the group may still allocate


def read_meminfo(name: str, proc: Path = PROC) -> int | None:
    """Return the bytes in a line of /proc/meminfo, such as MemTotal; None if it cannot be read."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return None


def total_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the maximum bytes this process may use: those of the machine, or of its container. 0 if unknown."""
    total = read_meminfo("MemTotal", proc)
    return 0 if total is None else min([total, *(limit.most for limit in iter_limits(proc, cgroups))])


def iter_limits(proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[GroupLimit]:
    """Yield the limits of this process's memory groups and of their parents, which also apply."""
    for folder in _find_groups(proc, cgroups):
        yield from _read_limits(folder)


def _find_groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = cgroups / controllers
        group = root / path.lstrip("/")
        while group.is_relative_to(root):
            yield group
            group = group.parent


def _read_limits(folder: Path) -> Iterator[GroupLimit]:
    """Yield the limit of a group; nothing without one."""
    for limit, used in _LIMITS:
        try:
            most = (folder / limit).read_text().strip()
            if most != "max":
                left = int(most) - int((folder / used).read_text()) + _count_reclaimed(folder)
                yield GroupLimit(int(most), max(0, left))
        except (OSError, ValueError):
            continue  # this group is of the other version, or hidden in a container


def _count_reclaimed(folder: Path) -> int:
    """Return the bytes that count as used but are freed under pressure."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return max((int(line.split()[1]) for line in lines if line.startswith(_RECLAIMED)), default=0)
