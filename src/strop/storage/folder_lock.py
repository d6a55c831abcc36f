"""A folder is used by one run at a time.

    <folder>/.strop.lock     JSON: who holds the folder (process, host, command, since when)

The lock is the kernel's (flock) on that file: it is gone with the process, however it dies, also when a process number is used again, and a
stopped process keeps it. Children do not inherit it: the descriptor is closed when they fork or execute a program.

Two machines may share a folder whose file system keeps locks to itself, or has none. So the holder also renews the file's time every
``BEAT_SECONDS``, and a run that finds a holder on another machine waits until the file was renewed, which means that the holder is alive,
or was not for ``STALE_SECONDS`` by the clock of the file system. Without the kernel's lock (some network file systems), creating the file
(O_EXCL) is the lock, with one warning.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from strop.safety.redaction import describe_command
from strop.storage.storage_error import StorageError

log = logging.getLogger(__name__)

LOCK_FILE = ".strop.lock"
ZOMBIE = "zombie"
BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0  # a holder on another machine that did not renew its lock for so long is dead
CHILD_SECONDS = 2.0  # children of a dead holder have so long to close what they inherited
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}


class FolderLocked(StorageError):
    """Another run uses the folder. The message says which one, and what to do."""


@dataclass(frozen=True, kw_only=True)
class LockHolder:
    """Who holds a folder."""

    pid: int
    host: str
    boot: str  # names one start of the kernel; empty where unknown
    namespace: str  # of process numbers: containers have their own
    started: str  # of the process, which tells it from a later one with its number; empty where unknown
    since: str
    command: str
    log_dir: str
    token: str  # of this lock
    kernel_lock: bool = True

    def __str__(self) -> str:
        logs = f", logs in {self.log_dir}" if self.log_dir else ""
        return f"process {self.pid} on {self.host} since {self.since} ({self.command}{logs})"

    @property
    def same_kernel(self) -> bool:
        """Whether the holder runs, or ran, on this machine since it was started: the kernel's locks then tell whether it lives."""
        return self.boot == _boot() and (bool(self.boot) or self.host == socket.gethostname())

    @property
    def is_local(self) -> bool:
        """Whether process numbers mean the same for the holder and this process."""
        return self.same_kernel and self.namespace == _namespace()

    @property
    def is_alive(self) -> bool:
        """Whether a local holder's process exists, and is not another one with its number."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass
        started = _process_start(self.pid)
        return started != ZOMBIE and self.started in ("", started)


class FolderLock:
    """The lock of a folder, from ``acquire`` to ``release``."""

    def __init__(self, path: Path, descriptor: int, holder: LockHolder) -> None:
        self.path = path
        self.holder = holder
        self._descriptor: int | None = descriptor
        self._guard = threading.Lock()  # of the descriptor
        self._stop = threading.Event()
        _held.add(self)
        threading.Thread(target=self._beat, name="strop-folder-lock", daemon=True).start()

    @classmethod
    def acquire(cls, folder: Path, *, log_dir: Path | None = None) -> FolderLock:
        """Lock an existing folder. Raises FolderLocked if another run, or this process, holds it; OSError if it cannot be written."""
        path = folder.absolute() / LOCK_FILE
        holder = make_holder(log_dir)
        deadline = time.monotonic() + CHILD_SECONDS
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                locked = _try_lock(descriptor)
                if locked is None:
                    break
                if not locked:
                    found = _read(path)
                    if found is None or not found.is_local or found.is_alive:
                        raise FolderLocked(_describe(folder, found))
                    if time.monotonic() > deadline:  # a child that library code forked still has the descriptor
                        _remove_stale(path, found)
                    time.sleep(0.05)
                    os.close(descriptor)
                    continue
                if not _is_same_file(descriptor, path):  # its last holder removed it when it was done
                    os.close(descriptor)
                    continue
                found = _read(path)
                if found is not None and not found.same_kernel:  # this file system may keep its locks from other machines
                    _await_silence(folder, path, found)
                _write(descriptor, holder)
                return cls(path, descriptor, holder)
            except BaseException:
                os.close(descriptor)
                raise
        os.close(descriptor)
        return cls._acquire_without_kernel(folder, path, LockHolder(**{**asdict(holder), "kernel_lock": False}))

    @classmethod
    def _acquire_without_kernel(cls, folder: Path, path: Path, holder: LockHolder) -> FolderLock:
        log.warning(
            "the file system of %s has no locks between processes: a file renewed every %g s is used instead, and a run that was "
            "killed on another machine is known to be dead after %g s",
            folder,
            BEAT_SECONDS,
            STALE_SECONDS,
        )
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                found = _read(path)
                if found is not None and found.is_local and found.is_alive:
                    raise FolderLocked(_describe(folder, found)) from None
                if found is None or not found.is_local:
                    _await_silence(folder, path, found)
                _remove_stale(path, found)
                continue
            _write(descriptor, holder)
            return cls(path, descriptor, holder)

    def release(self) -> None:
        """Give the folder back, and remove the file. Safe to call twice."""
        if self._descriptor is None:
            return
        self._stop.set()
        try:
            found = _read(self.path)
            if found is not None and found.token == self.holder.token:
                self.path.unlink(missing_ok=True)
        except OSError:
            pass  # the lock is the kernel's, not the file
        with self._guard:
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        _held.discard(self)

    def _beat(self) -> None:
        warned = False
        while not self._stop.wait(BEAT_SECONDS):
            try:
                with self._guard:
                    if self._descriptor is not None:
                        os.utime(self._descriptor)
                lost = (found := _read(self.path)) is None or found.token != self.holder.token
            except OSError:
                continue  # a disk that is full or away for a moment; the kernel's lock is unaffected
            if lost and not warned and not self._stop.is_set():
                warned = True
                log.warning("%s was removed or taken over while this run uses the folder; another run may start there", self.path)


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close a forked child's copies of the locks, which would outlive this process. This does not release them."""
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_close_in_child)


def read_holder(folder: Path) -> LockHolder | None:
    """Return who holds a folder, or None if nobody does. For ``strop doctor``: never raises, and takes no lock."""
    path = folder / LOCK_FILE
    holder = _read(path)
    if holder is None:
        return None
    if not holder.is_local:
        return holder if (age := _age(path)) is not None and age < STALE_SECONDS else None
    return holder if holder.is_alive else None


def make_holder(log_dir: Path | None = None) -> LockHolder:
    """Describe this process."""
    return LockHolder(
        pid=os.getpid(),
        host=socket.gethostname(),
        boot=_boot(),
        namespace=_namespace(),
        started=_process_start(os.getpid()),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        command=describe_command()[:500],
        log_dir="" if log_dir is None else str(log_dir),
        token=secrets.token_hex(8),
    )


def _describe(folder: Path, holder: LockHolder | None) -> str:
    who = "another run" if holder is None else f"another run: {holder}"
    stop = f"stop that one (kill {holder.pid}{'' if holder.is_local else f' on {holder.host}'})" if holder else "stop that one"
    if holder is not None and holder.is_local and holder.pid == os.getpid():
        who, stop = f"another run of this process, since {holder.since}", "wait for that one"
    return f"{folder} is in use by {who}. Two runs in one folder would destroy each other's records; {stop}"


def _try_lock(descriptor: int) -> bool | None:
    """Take the kernel's lock. False: another process has it. None: this file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            return False
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def _await_silence(folder: Path, path: Path, found: LockHolder | None) -> None:
    """Wait until the holder that the file names has not renewed it for ``STALE_SECONDS``. Raises FolderLocked if it is renewed."""
    first, age = _time(path), _age(path)
    if age is not None and age < STALE_SECONDS:
        who = found or "another run"
        log.warning("%s was last used by %s; waiting up to %.0f s to see whether it is alive", folder, who, STALE_SECONDS - age)
    while age is not None and age < STALE_SECONDS:
        time.sleep(min(BEAT_SECONDS / 5, STALE_SECONDS - age))
        if (now := _time(path)) is not None and now != first:
            raise FolderLocked(_describe(folder, _read(path)))
        age = _age(path)


def _age(path: Path) -> float | None:
    """Return the seconds since a file was renewed, by the clock of its file system; None if there is none."""
    probe = path.with_name(f"{LOCK_FILE}.{secrets.token_hex(4)}")
    renewed = _time(path)
    if renewed is None:
        return None
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        now = _time(probe)
        probe.unlink(missing_ok=True)
    except OSError:
        now = time.time_ns()
    return ((now or time.time_ns()) - renewed) / 1e9


def _time(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _remove_stale(path: Path, found: LockHolder | None) -> None:
    """Remove the lock file of a dead holder, unless another run was faster."""
    aside = path.with_name(f"{LOCK_FILE}.{secrets.token_hex(4)}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    taken = _read(aside)
    if (taken and taken.token) != (found and found.token):  # a new holder's: give it back
        try:
            os.link(aside, path)
        except OSError:
            os.rename(aside, path)
    aside.unlink(missing_ok=True)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino)


def _write(descriptor: int, holder: LockHolder) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(asdict(holder), indent=1) + "\n").encode(), 0)
    os.fsync(descriptor)


def _read(path: Path) -> LockHolder | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return LockHolder(**{field.name: values[field.name] for field in fields(LockHolder)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _process_start(pid: int) -> str:
    """Return when a process started, in clock ticks since boot, or ZOMBIE; empty where /proc does not say."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return ZOMBIE if state in "ZX" else rest[18]
    except (OSError, IndexError):
        return ""
