"""The folders of a run: created, tested for writing, and used by one run at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from strop.safety.printable import describe_command
from strop.storage.files import StorageError, find_refusal, format_bytes, free_bytes, shorten_path

log = logging.getLogger(__name__)

_PROBE_SIZE = 1 << 16
_IN_THE_WAY = re.compile(r"(\.tmp_)?step_[0-9]+")


def prepare_folder(key: str, folder: Path) -> None:
    """Create the folder that ``key`` names. Raises StorageError with the key if it cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{key}: {explain_folder(folder, error)}") from error


def probe_folder(key: str, folder: Path) -> None:
    """Write a file to the folder, flush it to disk and remove it. Raises StorageError with the key."""
    prepare_folder(key, folder)
    probe = folder / f".strop_probe_{os.getpid()}_{secrets.token_hex(4)}"
    try:
        try:
            with probe.open("wb") as file:
                file.write(bytes(_PROBE_SIZE))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{key}: {explain_folder(folder, error)}") from error


def find_folder_problem(folder: Path) -> str | None:
    """Return why a folder can neither be written nor created; None if it can. Nothing is left in it."""
    # A file or a dangling link counts as existing, because nothing can be created there.
    existing = next(path for path in (folder, *folder.parents) if path.is_symlink() or path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".strop_probe_", dir=existing):
            return None
    except OSError as error:
        return explain_folder(folder, error)


def explain_folder(folder: Path, error: OSError) -> str:
    """Explain why a folder cannot be created or written, and what to do."""
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {os.readlink(path)}, which does not exist; create that folder, or set another one"
        if path.exists():
            if not path.is_dir():
                return f"{path} is a file, not a folder; remove it, or set another folder"
            break
    reason = find_refusal(error, folder) or error.strerror or str(error)
    free = f" ({format_bytes(free_bytes(folder))} free)" if "full" in reason or "quota" in reason else ""
    return f"{folder} cannot be written: {reason}{free}; set a folder that this user can write"


def check_entries(key: str, folder: Path) -> None:
    """Check that no file has the name of a checkpoint folder. Raises StorageError with the key."""
    for path in sorted(folder.iterdir()):
        if _IN_THE_WAY.fullmatch(path.name) and not path.is_dir():
            raise StorageError(
                f"{key}: {path} is {'a dangling link' if path.is_symlink() else 'a file'}, and a checkpoint would be a folder of that "
                "name; move it away, or set another folder"
            )


def check_space(key: str, folder: Path, needed: int, what: str) -> None:
    """Check that ``needed`` bytes are free. Raises StorageError with the key, the folder, and what is needed and free."""
    free = free_bytes(folder)
    if free < needed:
        raise StorageError(
            f"{key}: {folder} has {format_bytes(free)} free, and {what} needs {format_bytes(needed)}; make room there, set another folder"
            ", or save less (checkpointing.save_optimizer=false, or checkpointing.enabled=false)"
        )


LOCK_FILE = ".strop.lock"
ZOMBIE = "zombie"
CHILD_SECONDS = 2.0  # time for the children of a dead holder to close inherited descriptors
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}


class FolderLocked(StorageError):
    """Another run uses the folder. The message names it, and what to do."""


@dataclass(frozen=True, kw_only=True)
class LockHolder:
    """The process that holds a folder."""

    pid: int
    host: str
    boot: str  # identifies a boot of the kernel; empty if unknown
    namespace: str  # of process ids: containers have their own
    started: str  # start time of the process, which distinguishes it from a later one with the same pid; empty if unknown
    since: str
    command: str
    log_dir: str
    token: str  # of this lock

    def __str__(self) -> str:
        logs = f", logs in {self.log_dir}" if self.log_dir else ""
        return f"process {self.pid} on {self.host} since {self.since} ({self.command}{logs})"

    @property
    def same_kernel(self) -> bool:
        """Whether the holder runs, or ran, on this machine since its boot, so that the kernel's lock shows whether it is alive."""
        return self.boot == _boot() and (bool(self.boot) or self.host == socket.gethostname())

    @property
    def is_local(self) -> bool:
        """Whether process ids mean the same for the holder and this process."""
        return self.same_kernel and self.namespace == _namespace()

    @property
    def is_alive(self) -> bool:
        """Whether a local holder's process exists, and is not another one with the same pid."""
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
        _held.add(self)

    @classmethod
    def acquire(cls, folder: Path, *, log_dir: Path | None = None) -> FolderLock:
        """Lock an existing folder. Raises FolderLocked if another run, or this process, holds it; OSError if it cannot be written."""
        path = folder.absolute() / LOCK_FILE
        holder = make_holder(log_dir)
        deadline = time.monotonic() + CHILD_SECONDS
        while True:
            descriptor, created = _open(path)
            try:
                locked = _try_lock(descriptor)
                if locked is None:
                    break
                if not locked:
                    found = _read(path)
                    if found is None or not found.is_local or found.is_alive:
                        raise FolderLocked(_describe(folder, found))
                    if time.monotonic() > deadline:  # a child forked by library code still has the descriptor
                        _remove_stale(path, found)
                    time.sleep(0.05)
                    os.close(descriptor)
                    continue
                if not _is_same_file(descriptor, path):  # the last holder removed it at its end
                    os.close(descriptor)
                    continue
                found = _read(path)
                if found is not None and not found.same_kernel:  # this file system may not share locks between machines
                    log.warning(
                        "%s was last used by %s, which did not release it: either it was killed, or it still runs and this file system "
                        "does not share locks between machines; in that case stop one of the two", folder, found,
                    )  # fmt: skip
                _write(descriptor, holder)
                return cls(path, descriptor, holder)
            except BaseException:
                os.close(descriptor)
                raise
        return cls._acquire_without_kernel(folder, path, descriptor, holder, created=created)

    @classmethod
    def _acquire_without_kernel(
        cls, folder: Path, path: Path, descriptor: int, holder: LockHolder, *, created: bool
    ) -> FolderLock:
        log.warning(
            "the file system of %s has no locks between processes: the file %s is used instead, and has to be removed by hand if a run "
            "is killed on another machine", folder, LOCK_FILE,
        )  # fmt: skip
        while not created:
            os.close(descriptor)
            found = _read(path)
            if found is None or not found.is_local or found.is_alive:
                raise FolderLocked(f"{_describe(folder, found)}, or remove {path} if it is dead")
            _remove_stale(path, found)
            descriptor, created = _open(path)
        _write(descriptor, holder)
        return cls(path, descriptor, holder)

    def release(self) -> None:
        """Release the folder, and remove the file. Safe to call twice."""
        if self._descriptor is None:
            return
        try:
            found = _read(self.path)
            if found is not None and found.token == self.holder.token:
                self.path.unlink(missing_ok=True)
        except OSError:
            pass  # the kernel holds the lock, not the file
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        _held.discard(self)


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close a forked child's copies of the locks, which would outlive this process. This does not release them."""
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_close_in_child)


def read_holder(folder: Path) -> LockHolder | None:
    """Return the holder of a folder, or None. For ``strop doctor``: never raises, and takes no lock. A run killed on another
    machine counts as alive.
    """
    path = folder / LOCK_FILE
    holder = _read(path)
    return None if holder is None or (holder.is_local and not holder.is_alive) else holder


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


def _open(path: Path) -> tuple[int, bool]:
    """Return a descriptor of the file, and whether this call created it."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644), False


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


def _remove_stale(path: Path, found: LockHolder | None) -> None:
    """Remove the lock file of a dead holder, unless another run was faster."""
    aside = path.with_name(f"{LOCK_FILE}.{secrets.token_hex(4)}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    taken = _read(aside)
    if (taken and taken.token) != (found and found.token):  # it belongs to a new holder: restore it
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
    """Return a process's start time in clock ticks since boot, or ZOMBIE; empty if /proc does not show it."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return ZOMBIE if state in "ZX" else rest[18]
    except (OSError, IndexError):
        return ""


@contextmanager
def lock_folders(
    folders: Mapping[str, Path], *, log_dir: Path | None = None, hint: str = "", check: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold folders, given by configuration keys, for the duration of the context. A folder under two keys is locked once.

    ``check`` is called when all are locked.

    Raises FolderLocked if another run holds one of them, and StorageError if one is not writable. Then none stays locked, and
    newly created ones are removed.
    """
    created: list[Path] = []
    with ExitStack() as stack:
        seen: set[tuple[int, int]] = set()
        try:
            for key, folder in ((key, shorten_path(folder)) for key, folder in folders.items()):
                if not folder.exists():
                    created.append(folder)
                prepare_folder(key, folder)
                identity = (folder.stat().st_dev, folder.stat().st_ino)
                if identity not in seen:
                    seen.add(identity)
                    stack.callback(_lock(key, folder, log_dir, hint).release)
                probe_folder(key, folder)
            check()
        except BaseException:
            stack.close()
            for folder in reversed(created):
                with suppress(OSError):  # not empty
                    folder.rmdir()
            raise
        yield


def _lock(key: str, folder: Path, log_dir: Path | None, hint: str) -> FolderLock:
    try:
        return FolderLock.acquire(folder, log_dir=log_dir)
    except FolderLocked as error:
        raise FolderLocked(f"{key}: {error}, or set another {key}{hint}") from None
    except OSError as error:
        raise StorageError(f"{key}: {explain_folder(folder, error)}") from error
