"""The first process of a sandbox, started by ``local_provider.py`` in bubblewrap. Standard library only.

It mounts the layers of the image, makes them its root, lets go of all else, and starts commands. It is the only process in the sandbox
with privileges (of the sandbox's user namespace); commands, also those that copy files, give them up before they read anything of the
image. When its channel closes, it exits, and the kernel ends every other process of the sandbox.

Messages are packets of JSON; descriptors for a command's streams come with them.
"""

from __future__ import annotations

import array
import ctypes
import errno
import json
import os
import resource
import select
import shutil
import signal
import socket
import stat
import sys
import tarfile
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # each import that every sandbox would wait for counts: dataclasses alone is half of its start
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

OPAQUE = "user.overlay.opaque"
PACKET = 1 << 18  # bytes of one message, at most
_PATHS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER, _DROP_BOUND, _DUMPABLE, _CAPABILITY_VERSION = 38, 22, 2, 24, 4, 0x20080522
_NEW_USER = 0x10000000
_NOSUID, _NODEV, _BIND, _RECURSIVE, _DETACH = 2, 4, 1 << 12, 1 << 14, 2  # of mount and umount2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# Of commands that run as root: chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service.
_KEPT = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7, 10))

_libc = ctypes.CDLL(None, use_errno=True)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _SystemCallFilter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


class Settings:
    """What the provider decides."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.layers: list[str] = values["layers"]  # folders, the lowest first
        self.disk_mb: int = values["disk_mb"]
        self.filter: str = values["filter"]  # of system calls, as hexadecimal digits
        self.ports: list[int] = values["ports"]  # of 127.0.0.1, at which the provider listens in this sandbox
        self.many_users: bool = values["many_users"]  # whether the image's users exist in this namespace; else there is only root
        self.processes: int = values["processes"]
        self.memory_mb: int = values["memory_mb"]  # measured, where there is no control group; else 0


class _Refused(Exception):
    """A command cannot start, by what the image or the request has."""


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)  # commands must not reach it
    os.closerange(3, channel.fileno())
    os.closerange(channel.fileno() + 1, 4096)
    settings = Settings(json.loads(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tarfile.pwd = tarfile.grp = None  # type: ignore[attr-defined]  # names of users would load libraries that the image chooses
    if settings.many_users:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    upper, overlay = make_root(settings)
    listeners = [socket.create_server(("127.0.0.1", port)) for port in settings.ports]
    enter_users(65536 if settings.many_users else 1)
    _libc.prctl(_DUMPABLE, 0, 0, 0, 0)
    ready = json.dumps({"ready": True, "overlay": overlay}).encode()
    socket.send_fds(channel, [ready], [each.fileno() for each in listeners])
    for each in listeners:
        each.close()
    Init(channel, settings, upper).serve()


# --- the file system --------------------------------------------------------------------------------------------------------


def make_root(settings: Settings) -> tuple[int, bool]:
    """Enter the image. Return a descriptor of the folder with what is written, and whether that is all it has (overlayfs)."""
    try:
        _mount("tmpfs", "/state", "tmpfs", _NOSUID | _NODEV, f"size={settings.disk_mb}m,mode=0755")
        for name in ("upper", "work"):
            os.mkdir(f"/state/{name}", 0o755)
        lower = ":".join(reversed(settings.layers))
        _mount(
            "overlay",
            "/image",
            "overlay",
            _NOSUID | _NODEV,
            f"lowerdir={lower},upperdir=/state/upper,workdir=/state/work,userxattr",
        )
        overlay = True
    except OSError:  # before Linux 5.11, or refused in a container
        overlay = False
        for layer in settings.layers:
            copy_layer(layer, "/state/upper")
        _mount("/state/upper", "/image", None, _BIND, "")
    for name in ("dev", "proc"):
        target = f"/image/{name}"
        if not stat.S_ISDIR(_mode(target)):  # missing, or a link of the image that would lead out of it
            if _mode(target):
                os.unlink(target)
            os.mkdir(target, 0o755)
        _mount(f"/{name}", target, None, _BIND | _RECURSIVE, "")
    upper = os.open("/state/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.chdir("/image")
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "umount")
    os.chdir("/")
    _name_localhost()
    return upper, overlay


def enter_users(count: int) -> None:
    """Enter a second user namespace, which owns no other namespace and lacks the user that prepared this one, root of the machine."""
    _libc.prctl(_DUMPABLE, 1, 0, 0, 0)  # changing the user has made /proc/1 another's
    reading, writing = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.read(reading, 1)
        try:
            for kind in ("uid", "gid"):
                with open(f"/proc/1/{kind}_map", "w") as file:
                    file.write(f"0 0 {count}\n")
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
    status = _libc.unshare(_NEW_USER)
    os.write(writing, b"1")
    failed = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    os.close(reading)
    os.close(writing)
    if status or failed:
        raise OSError(failed or errno.EPERM, "a second user namespace was refused")


def _name_localhost() -> None:
    """Images have an empty /etc/hosts, or none; without it programs do not find localhost."""
    with suppress(OSError):
        if stat.S_ISREG(os.lstat("/etc/hosts").st_mode) and os.lstat("/etc/hosts").st_size == 0:
            os.unlink("/etc/hosts")
    with suppress(OSError):
        descriptor = os.open("/etc/hosts", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        os.write(descriptor, b"127.0.0.1 localhost sandbox\n::1 localhost\n")
        os.close(descriptor)
    with suppress(OSError):
        os.mkdir("/tmp")
        os.chmod("/tmp", 0o1777)


def copy_layer(layer: str, target: str) -> None:
    """Do what overlayfs would show of a layer, where there is no overlayfs: copy it over those below, and remove what it hides."""
    for name in os.listdir(layer):
        source, into = f"{layer}/{name}", f"{target}/{name}"
        found = os.lstat(source)
        folder = stat.S_ISDIR(found.st_mode)
        merged = folder and stat.S_ISDIR(_mode(into)) and not _is_opaque(source)
        if _mode(into) and not merged:
            shutil.rmtree(into) if stat.S_ISDIR(_mode(into)) else os.unlink(into)
        if stat.S_ISCHR(found.st_mode):
            continue
        if folder:
            if not merged:
                os.mkdir(into)
            copy_layer(source, into)
        elif stat.S_ISFIFO(found.st_mode):
            os.mkfifo(into)
        else:
            shutil.copyfile(source, into, follow_symlinks=False)
        with suppress(OSError):  # an owner that is no user here
            os.chown(into, found.st_uid, found.st_gid, follow_symlinks=False)
        if not stat.S_ISLNK(found.st_mode):
            os.chmod(into, stat.S_IMODE(found.st_mode))
        os.utime(into, ns=(found.st_mtime_ns, found.st_mtime_ns), follow_symlinks=False)


def _is_opaque(path: str | int) -> bool:
    try:
        return os.getxattr(path, OPAQUE) == b"y"
    except OSError:
        return False


def _mode(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


def _mount(source: str, target: str, kind: str | None, flags: int, data: str) -> None:
    arguments = (source.encode(), target.encode(), None if kind is None else kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(_libc.mount(*arguments), f"mounting {target}")


def _check(status: int, what: str) -> None:
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# --- commands ---------------------------------------------------------------------------------------------------------------


class Init:
    """Starts and ends commands, and reaps what they leave."""

    def __init__(self, channel: socket.socket, settings: Settings, upper: int) -> None:
        self.channel, self.settings, self.upper = channel, settings, upper
        self.numbers: dict[int, int] = {}  # of requests, by process
        self.errors: dict[int, int] = {}  # pipes for why a command did not start, by process
        self.over_memory: set[int] = set()
        reading, self.wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.woken = reading
        signal.set_wakeup_fd(self.wake)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(self.woken, select.POLLIN)
        while True:
            measured = self.settings.memory_mb and self.numbers
            ready = dict(poll.poll(50 if measured else None))
            if self.woken in ready:
                os.read(self.woken, 4096)
                self.reap()
            if self.channel.fileno() in ready:
                packet, descriptors = receive(self.channel)
                if not packet:
                    os._exit(0)  # the provider, or its run, is gone
                self.handle(json.loads(packet), descriptors)
            if measured:
                self.bound_memory()

    def handle(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if message["do"] == "kill":
            for process in [process for process, number in self.numbers.items() if number == message["number"]]:
                kill_session(process)
        elif message["do"] == "ping":
            self.reply(message["number"], time=time.time())
        else:
            self.start(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def reply(self, number: int, **values: Any) -> None:
        with suppress(BrokenPipeError):
            self.channel.send(json.dumps({"number": number, **values}).encode())

    def start(self, message: dict[str, Any], descriptors: list[int]) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            process = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            self.reply(message["number"], full=f"no process can be started: {error.strerror}")
            return
        if process == 0:
            become(message, descriptors, writing, self.settings, self.upper)
        os.close(writing)
        self.numbers[process], self.errors[process] = message["number"], reading

    def reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                process, status = ended
                if process not in self.numbers:
                    continue
                number, reading = self.numbers.pop(process), self.errors.pop(process)
                refused = os.read(reading, 4096).decode("utf-8", "replace")
                os.close(reading)
                over = process in self.over_memory
                self.over_memory.discard(process)
                values = {"refused": refused} if refused else {"status": os.waitstatus_to_exitcode(status), "memory": over}
                self.reply(number, **values)

    def bound_memory(self) -> None:
        """End every command when all together hold more than they may. Only where no control group does it."""
        total = 0
        for name in os.listdir("/proc"):
            if name.isdigit() and name != "1":
                with suppress(OSError), open(f"/proc/{name}/smaps_rollup") as file:
                    total += sum(int(line.split()[1]) for line in file if line.startswith(("Pss:", "SwapPss:")))
        if total > self.settings.memory_mb << 10:
            self.over_memory = set(self.numbers)
            os.kill(-1, signal.SIGKILL)


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a packet and the descriptors that come with it, closed in commands. An empty packet: the other side is gone."""
    found = array.array("i")
    try:
        packet, extra, _, _ = channel.recvmsg(PACKET, socket.CMSG_LEN(16 * found.itemsize), socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return b"", []
    for level, kind, data in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return packet, list(found)


def kill_session(leader: int) -> None:
    """End a command and what it started, except for what began its own session: a server that it leaves running."""
    for _ in range(100):
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
        members = list(_members(leader))
        for process in members:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not members:
            return


def _members(leader: int) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                if int(fields[3]) == leader and fields[0] not in (b"Z", b"X"):
                    yield int(name)


def become(message: dict[str, Any], descriptors: list[int], errors: int, settings: Settings, upper: int) -> NoReturn:
    """Turn this fork into a command. Never returns."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # not the first process, whose end would look like a fault of this machine
        if message["do"] == "exec":
            for stream, descriptor in enumerate(descriptors):
                os.dup2(descriptor, stream)
            user = find_user(message["user"] if settings.many_users else "0")
            with suppress(OSError):
                os.makedirs(message["cwd"], exist_ok=True)  # by root, as Docker makes the working folder of an image
            give_up(settings, user)
            enter(message["cwd"])
            environment = {"PATH": _PATHS, "HOME": user.home, **message["environment"]}
            os.execvpe(message["argv"][0], message["argv"], environment)
        files: dict[str, Callable[[], None]] = {
            "put": lambda: put_tree(descriptors[0], message["path"]),
            "get": lambda: get_tree(descriptors[0], message["path"], message["limit"]),
            "snapshot": lambda: write_layer(descriptors[0], upper),
        }
        give_up(settings, User())
        files[message["do"]]()
        os._exit(0)
    except FileNotFoundError as error:
        what = message["argv"][0] if message["do"] == "exec" and error.filename in (None, message["argv"][0]) else error.filename
        os.write(errors, f"there is no {what}"[:4000].encode("utf-8", "replace"))
    except BaseException as error:
        os.write(errors, (str(error) or type(error).__name__)[:4000].encode("utf-8", "replace"))
    os._exit(127)


class User:
    """A user of the image."""

    def __init__(self, uid: int = 0, gid: int = 0, home: str = "/root", groups: tuple[int, ...] = ()) -> None:
        self.uid, self.gid, self.home, self.groups = uid, gid, home, groups


def find_user(text: str) -> User:
    """Find ``USER[:GROUP]``, names or numbers, in the image's own tables. Raises _Refused."""
    name, _, group = text.partition(":")
    rows = [row for row in _read_table("/etc/passwd") if len(row) >= 6 and (name or "0") in (row[0], row[2])]
    if not rows and not (name or "0").isdigit():
        raise _Refused(f"the image has no user {name!r}")
    try:
        user = User(int(rows[0][2]), int(rows[0][3]), rows[0][5] or "/") if rows else User(int(name or 0), int(name or 0), "/")
        names = _read_table("/etc/group")
        more = tuple(int(row[2]) for row in names if rows and len(row) >= 4 and rows[0][0] in row[3].split(","))
        if group:
            gids = [int(row[2]) for row in names if len(row) >= 3 and row[0] == group] or [int(group)]
            user = User(user.uid, gids[0], user.home)
    except ValueError:
        raise _Refused(f"the image has no user {text!r}, or its tables of users are damaged") from None
    return User(user.uid, user.gid, user.home, more[:64])


def _read_table(path: str) -> list[list[str]]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        text = os.read(descriptor, 1 << 20) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
        os.close(descriptor)
    except OSError:
        return []
    return [line.split(":") for line in text.decode("utf-8", "replace").splitlines()]


def give_up(settings: Settings, user: User) -> None:
    """Become a user of the image, with the few privileges that its root has, forever."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (settings.processes + 2, settings.processes + 2))
    for number in range(64):
        if not _KEPT >> number & 1:
            _libc.prctl(_DROP_BOUND, number, 0, 0, 0)
    if settings.many_users:
        os.setgroups(user.groups)
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
    kept = 0 if user.uid else _KEPT
    header = _CapabilityHeader(_CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(data)), "giving up privileges")
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "giving up privileges")
    code = bytes.fromhex(settings.filter)
    program = _SystemCallFilter(len(code) // 8, code)
    _check(_libc.prctl(_SECCOMP, _FILTER, ctypes.byref(program), 0, 0), "filtering system calls")


def enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise _Refused(f"the folder {folder} cannot be entered: {error.strerror}") from None


# --- files ------------------------------------------------------------------------------------------------------------------


def put_tree(source: int, path: str) -> None:
    os.makedirs(path, exist_ok=True)
    with open(source, "rb") as file, tarfile.open(fileobj=file, mode="r|") as archive:
        archive.extraction_filter = lambda member, where: member  # type: ignore[assignment]  # nothing here can leave the sandbox
        archive.extractall(path, numeric_owner=True)


class _Bounded:
    """A pipe that takes a number of bytes."""

    def __init__(self, descriptor: int, limit: int) -> None:
        self.descriptor, self.left = descriptor, limit

    def write(self, data: bytes) -> int:
        self.left -= len(data)
        if self.left < 0:
            raise _Refused("it is larger than allowed")
        view = memoryview(data)
        while view:
            view = view[os.write(self.descriptor, view) :]
        return len(data)


def get_tree(sink: int, path: str, limit: int) -> None:
    path = path.rstrip("/") or "/"
    with tarfile.open(fileobj=_Bounded(sink, limit), mode="w|", format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
        archive.add(path, os.path.basename(path) or ".", filter=_keep_files)


def _keep_files(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return entry if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() else None


def write_layer(sink: int, upper: int) -> None:
    """Write what was changed as a layer of an image: overlayfs' whiteouts and opaque folders in the names that OCI has for them."""
    with tarfile.open(fileobj=_Bounded(sink, 1 << 62), mode="w|", format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
        os.fchdir(upper)
        for folder, folders, names in os.walk("."):
            at = "" if folder == "." else folder.removeprefix("./") + "/"
            if at and _is_opaque(folder):
                archive.addfile(tarfile.TarInfo(f"{at}.wh..wh..opq"))
            for name in [*folders, *names]:
                if stat.S_ISCHR(_mode(f"{folder}/{name}")):
                    archive.addfile(tarfile.TarInfo(f"{at}.wh.{name}"))
                else:
                    archive.add(f"{folder}/{name}", at + name, recursive=False, filter=_keep_files)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(error.strerror if error.errno is None else error, file=sys.stderr)
        sys.exit(errno.EIO)
