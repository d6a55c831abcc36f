"""How this process gets memory for tensors on a CPU."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def reuse_freed_memory() -> bool:
    """Keep freed memory instead of giving it back to the system, where the C library is glibc; says whether it is.

    glibc maps every large block anew and unmaps it when it is freed, so a training step touches gigabytes of fresh pages, and each
    first touch of a page is a trap into the kernel: a third of a step on a small machine. A process that repeats the same step needs
    the same blocks again. The price is that memory stays with the process at its high-water mark.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
