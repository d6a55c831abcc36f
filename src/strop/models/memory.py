"""How this process gets memory for tensors on a CPU."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def reuse_freed_memory() -> bool:
    """Keep freed memory instead of giving it back to the system, where the C library is glibc; says whether it is.

    glibc maps every large block anew and unmaps it when it is freed, so a training step touches gigabytes of fresh pages, and each
    first touch of a page is a trap into the kernel: a fifth of a step on a small machine. A process that repeats the same step needs
    the same blocks again. The price is memory: holes that no later block fits stay with the process until ``give_back_freed_memory``.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def give_back_freed_memory() -> None:
    """Return what is free to the system, once in a while: blocks of ever new sizes leave holes that add up to gigabytes."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
