"""A seccomp sandbox: after ``confine()`` this process can compute and read files, and nothing else.

A kernel filter allows the system calls below and denies all others: no new process or program, no network, no file
written, created or removed, no signals, no resource limit raised. It cannot be undone. Linux only, on x86-64 and
64-bit ARM; elsewhere ``confine`` raises OSError.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

_X86_64 = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9, "mprotect": 10,
    "munmap": 11, "brk": 12, "rt_sigreturn": 15, "pread64": 17, "readv": 19, "writev": 20, "access": 21, "sched_yield": 24,
    "mremap": 25, "madvise": 28, "dup": 32, "nanosleep": 35, "getpid": 39, "exit": 60, "uname": 63, "fcntl": 72,
    "getcwd": 79, "readlink": 89, "gettimeofday": 96, "getrusage": 98, "sysinfo": 99, "getuid": 102, "getgid": 104,
    "geteuid": 107, "getegid": 108, "sigaltstack": 131, "gettid": 186, "futex": 202, "sched_getaffinity": 204,
    "getdents64": 217, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231,
    "openat": 257, "newfstatat": 262, "readlinkat": 267, "getrandom": 318, "membarrier": 324, "statx": 332, "rseq": 334,
}  # fmt: skip
_AARCH64 = {
    "read": 63, "write": 64, "close": 57, "fstat": 80, "ppoll": 73, "lseek": 62, "mmap": 222, "mprotect": 226,
    "munmap": 215, "brk": 214, "rt_sigreturn": 139, "pread64": 67, "readv": 65, "writev": 66, "faccessat": 48,
    "sched_yield": 124, "mremap": 216, "madvise": 233, "dup": 23, "nanosleep": 101, "getpid": 172, "exit": 93, "uname": 160,
    "fcntl": 25, "getcwd": 17, "gettimeofday": 169, "getrusage": 165, "sysinfo": 179, "getuid": 174, "getgid": 176,
    "geteuid": 175, "getegid": 177, "sigaltstack": 132, "gettid": 178, "futex": 98, "sched_getaffinity": 123,
    "getdents64": 61, "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115, "exit_group": 94,
    "openat": 56, "newfstatat": 79, "readlinkat": 78, "getrandom": 278, "membarrier": 283, "statx": 291, "rseq": 293,
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}  # the kernel's AUDIT_ARCH numbers

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # classic BPF: load a word, jump if equal, if any bit, return
_ALLOW, _DENY = 0x7FFF0000, 0x00050001  # deny: the call fails with EPERM
_NUMBER, _ARCHITECTURE, _OPEN_FLAGS = 0, 4, 32  # offsets in the kernel's seccomp_data; the flags are openat's third argument
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # prctl


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def confine() -> None:
    """Install the filter in this process, permanently. Raises OSError if the system does not support it."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ARCHITECTURES:
        raise OSError(f"there is no system-call filter for {sys.platform} on {machine}")
    code = _build_filter(*_ARCHITECTURES[machine])
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel refused the system-call filter: {os.strerror(number)}")


def _build_filter(architecture: int, calls: dict[str, int]) -> bytes:
    """Return the BPF program: instructions of 8 bytes (operation, jump if true, jump if false, constant)."""
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),  # another architecture numbers its calls differently
        (_RETURN, 0, 0, _DENY),
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 4, calls["openat"]),
        (_LOAD, 0, 0, _OPEN_FLAGS),
        (_ANY_BIT, 0, 1, writing),
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for number in calls.values():
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    code.append((_RETURN, 0, 0, _DENY))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
