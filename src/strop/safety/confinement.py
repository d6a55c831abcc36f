"""System call filters for Linux on x86-64 and 64-bit ARM; elsewhere they raise OSError. They cannot be undone.

After ``confine()`` this process can compute and read files, and nothing else: all calls but a few are denied, so no new process or
program, no network, no file written, created or removed, no signals, no resource limit raised.

``build_program_filter()`` is for programs in separate namespaces, which may start processes and write files. It denies calls
that could attack the kernel or the rest of the machine, and every call newer than this list.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

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

# Denied to programs: tracing others, mounts and namespaces, sockets (a pair of connected ones is allowed), memory that no limit
# counts (memfd, System V), resources shared by the whole machine (asynchronous I/O contexts, unwritten data, file watches, cached
# files), and kernel interfaces with many past vulnerabilities. The third row of numbers is the same on both architectures.
_X86_64_DENIED = {
    "shmget": 29, "shmat": 30, "socket": 41, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103, "personality": 135,
    "vhangup": 153, "modify_ldt": 154, "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164,
    "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171,
    "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "lookup_dcookie": 212,
    "clock_settime": 227, "mbind": 237, "set_mempolicy": 238, "mq_open": 240, "kexec_load": 246, "add_key": 248,
    "request_key": 249, "keyctl": 250, "migrate_pages": 256, "unshare": 272, "move_pages": 279, "perf_event_open": 298,
    "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "sync": 162, "syncfs": 306, "io_setup": 206, "io_destroy": 207,
    "io_getevents": 208, "io_submit": 209, "io_cancel": 210, "io_pgetevents": 333, "inotify_init": 253, "inotify_init1": 294,
    "inotify_add_watch": 254, "fadvise64": 221,
}  # fmt: skip
_AARCH64_DENIED = {
    "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "vhangup": 58, "quotactl": 60, "acct": 89, "personality": 92,
    "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116,
    "ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "adjtimex": 171,
    "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "shmat": 196, "socket": 198, "add_key": 217,
    "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "mbind": 235, "set_mempolicy": 237,
    "migrate_pages": 238, "move_pages": 239, "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264,
    "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
    "kcmp": 272, "finit_module": 273, "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
    "sync": 81, "syncfs": 267, "io_setup": 0, "io_destroy": 1, "io_submit": 2, "io_cancel": 3, "io_getevents": 4,
    "io_pgetevents": 292, "inotify_init1": 26, "inotify_add_watch": 27, "fadvise64": 223,
}  # fmt: skip
_BOTH_DENIED = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442,
    "quotactl_fd": 443, "memfd_secret": 447,
}  # fmt: skip
_PROGRAMS = {  # calls with relevant arguments, and what is denied
    "x86_64": ({"ioctl": 16, "clone": 56, "prlimit64": 302, "socketpair": 53}, _X86_64_DENIED),
    "aarch64": ({"ioctl": 29, "clone": 220, "prlimit64": 261, "socketpair": 199}, _AARCH64_DENIED),
}
_NEWEST = 450  # the newest call considered; x86-64's x32 calls have far higher numbers
_CLONE3 = 435  # its flags are in memory, which a filter cannot read; the C library falls back to clone
_NEW_NAMESPACE = 0x7E020080  # the flags of clone that create one
_UNIX_SOCKET = 1  # the only family allowed for a pair; others are created before they are refused, and load a kernel module
_SOCKETS = (_UNIX_SOCKET, 2, 10)  # families that may be allowed: Unix, IPv4, IPv6
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX, which type into a terminal

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # classic BPF: load a word, jump if equal, if any bit, return
_GREATER = 0x25
_ALLOW, _DENY, _UNKNOWN = 0x7FFF0000, 0x00050001, 0x00050026  # deny: the call fails with EPERM; unknown: with ENOSYS
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, (16, 24, 32)  # offsets in the kernel's seccomp_data
_OPEN_FLAGS = _ARGUMENTS[2]  # of openat
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # prctl


_Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, constant


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def confine() -> None:
    """Install the filter in this process, permanently. Raises OSError if the system does not support it."""
    code = build_confining_filter()
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel refused the system-call filter: {os.strerror(number)}")


def build_confining_filter() -> bytes:
    """Return the filter of ``confine``. Raises OSError if there is none for this machine."""
    return _build_filter(*_ARCHITECTURES[_machine()])


def build_program_filter(allowed: Collection[str] = ()) -> bytes:
    """Return the filter for programs in separate namespaces. Raises OSError if there is none for this machine.

    ``allowed``: calls that are not denied. Sockets that are allowed are Unix and Internet ones: others leave a network namespace (vsock).
    """
    machine = _machine()
    checked, denied = _PROGRAMS[machine]
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine][0]),
        (_RETURN, 0, 0, _DENY),
        (_LOAD, 0, 0, _NUMBER),
        (_GREATER, 0, 1, _NEWEST),
        (_RETURN, 0, 0, _UNKNOWN),
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _UNKNOWN),
    ]
    for name, number in {**denied, **_BOTH_DENIED}.items():
        if name not in allowed:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _DENY)]
        elif name == "socket":
            families = [(_EQUAL, 3 - place, 0, family) for place, family in enumerate(_SOCKETS)]
            code += _check_argument(number, 0, *families, (_RETURN, 0, 0, _DENY))
    code += _check_argument(checked["clone"], 0, (_ANY_BIT, 0, 1, _NEW_NAMESPACE), (_RETURN, 0, 0, _DENY))
    code += _check_argument(checked["prlimit64"], 0, (_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _DENY))  # of other processes
    code += _check_argument(checked["socketpair"], 0, (_EQUAL, 1, 0, _UNIX_SOCKET), (_RETURN, 0, 0, _DENY))
    for request in _TERMINAL_INPUT:
        code += _check_argument(checked["ioctl"], 1, (_EQUAL, 0, 1, request), (_RETURN, 0, 0, _DENY))
    code.append((_RETURN, 0, 0, _ALLOW))
    return _assemble(code)


def _check_argument(number: int, argument: int, *test: _Instruction) -> list[_Instruction]:
    """For the system call ``number``, test the lower half of an argument, then load the call's number again."""
    return [(_EQUAL, 0, len(test) + 2, number), (_LOAD, 0, 0, _ARGUMENTS[argument]), *test, (_LOAD, 0, 0, _NUMBER)]


def _machine() -> str:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ARCHITECTURES:
        raise OSError(f"there is no system-call filter for {sys.platform} on {machine}")
    return machine


def _build_filter(architecture: int, calls: dict[str, int]) -> bytes:
    """Return the BPF program: instructions of 8 bytes (operation, jump if true, jump if false, constant)."""
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),  # other architectures number calls differently
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
    return _assemble(code)


def _assemble(code: list[_Instruction]) -> bytes:
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


NOBODY = 65534
_DEVICES = ("null", "zero", "full", "random", "urandom")
NAMESPACES = (
    *(f"--unshare-{kind}" for kind in ("user", "ipc", "pid", "net", "uts")),
    "--as-pid-1",
    "--die-with-parent",
    "--new-session",
)


def isolate_command(command: list[str], readable: Iterable[str]) -> list[str]:
    """Return a command that runs ``command`` without network and without this machine's files, except ``readable`` and the
    system.

    Its /tmp is empty except for ``readable`` paths in it. If bubblewrap does not work, the command itself is returned.
    """
    if not _bubblewrap_works():
        return command
    identity = ["--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL"]
    return [
        "bwrap",
        *NAMESPACES,
        *identity,
        *("--perms", "0700", "--tmpfs", "/tmp"),  # first, otherwise it would hide readable paths below /tmp
        *show_system(readable),
        "--remount-ro",
        "/",
        *command,
    ]


@lru_cache(maxsize=1)
def _bubblewrap_works() -> bool:
    """Whether bubblewrap can create its namespaces on this machine."""
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        return False
    command = ["bwrap", *NAMESPACES, *show_system(()), "/usr/bin/env", "true"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode == 0


def show_system(readable: Iterable[str], shown_at: Callable[[str], str] = str) -> list[str]:
    """Return the arguments that expose this machine's programs and libraries, the interpreter, and ``readable``."""
    options = ["--ro-bind", "/usr", "/usr"]
    for folder in ("bin", "lib", "lib64", "sbin"):
        path = Path("/", folder)
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    made: set[str] = {"/", "/usr"}
    for needed in (sys.base_prefix, *readable):
        options += list(_bind(needed, shown_at(needed), made))
    options += ["--perms", "0755", "--dir", "/etc"]
    if Path("/etc/alternatives").is_dir():
        options += ["--ro-bind", "/etc/alternatives", "/etc/alternatives"]  # where /usr/bin's links lead
    options += ["--proc", "/proc", "--perms", "0755", "--dir", "/dev"]
    for device in _DEVICES:
        options += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return options


def _bind(path: str, shown_at: str, made: set[str]) -> Iterator[str]:
    """Bind ``path`` read-only, with parents that every user may enter, regardless of their permissions outside."""
    if path.startswith("/usr/"):
        return
    for parent in reversed(Path(shown_at).parents):
        if str(parent) not in made:
            made.add(str(parent))
            yield from ("--perms", "0755", "--dir", str(parent))
    yield from ("--ro-bind", path, shown_at)
