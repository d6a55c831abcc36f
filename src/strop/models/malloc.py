"""Settings of the C library's memory allocator, which allocates CPU tensors."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def reuse_freed_memory() -> bool:
    """Keep freed memory in the process instead of returning it to the system. Return whether that is supported (glibc only).

    By default glibc maps every large block with mmap and unmaps it when it is freed, so a training step touches gigabytes of new pages,
    each of which costs a page fault: a fifth of a step on a small machine. A process that repeats the same step needs the same
    blocks again. The cost is memory: fragments too small for later blocks stay allocated until ``trim_freed_memory``.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def trim_freed_memory() -> None:
    """Return free memory to the system. Call it periodically: blocks of varying sizes leave fragments that add up to gigabytes."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
