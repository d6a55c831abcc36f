"""How much memory a device has left for this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # of cgroups 2 and 1
_RECLAIMED = (
    "inactive_file ",
    "total_inactive_file ",
)  # lines of memory.stat: pages of files, which the kernel drops when it has to


def measure_free(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device, with those that torch's allocator holds unused.

    Raises ValueError where a CPU's free memory cannot be read.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return measure_free_host()


def measure_free_host(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the free bytes of the host: what the kernel can give without swapping, within the limits of this process' control groups.

    Raises ValueError where they cannot be read.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration) as error:
        raise ValueError(
            "train_mb_tokens: found auto, but the free memory of this machine cannot be read (/proc/meminfo has no MemAvailable). Set it "
            "to a number of tokens"
        ) from error
    return min([free, *(left for folder in _find_groups(proc, cgroups) for left in _left_in(folder))])


def _find_groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the folders of this process' memory groups and of their parents, whose limits hold too."""
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


def _left_in(folder: Path) -> Iterator[int]:
    """Yield the bytes that a group may still allocate; nothing without a limit."""
    for limit, used in _LIMITS:
        try:
            most = (folder / limit).read_text().strip()
            if most != "max":
                yield max(0, int(most) - int((folder / used).read_text()) + _count_reclaimed(folder))
        except (OSError, ValueError):
            continue  # this group is of the other version, or hidden in a container


def _count_reclaimed(folder: Path) -> int:
    """Return the bytes that count as used and are given up under pressure."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return max((int(line.split()[1]) for line in lines if line.startswith(_RECLAIMED)), default=0)
