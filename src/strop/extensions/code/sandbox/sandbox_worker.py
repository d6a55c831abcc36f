"""The process that runs programs, started by ``launcher.py``; in its own sandbox where the level has one. Standard library only.

    worker (waits)  - fork ->  job (init of a new process namespace; supervises)  - fork ->  the program, without privileges

Each job is a fork in namespaces of its own, with an empty folder in memory. Only that fork reads what was sent, so nothing of one program
is ever in the memory of the next. When it exits, the kernel ends every process and removes every file that the program left. The job
measures and ends the program; it holds the channel to the caller, and the program's descriptors are only its standard streams.

Messages in both directions: four bytes of length, then JSON. The caller's pickles would be code.
"""

from __future__ import annotations

import ast
import atexit
import base64
import contextlib
import ctypes
import gc
import json
import linecache
import os
import random
import resource
import select
import shutil
import signal
import site
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

# Imported before the first fork, so that programs need not wait for them.
WARM = (
    "array bisect collections copy datetime decimal fractions functools heapq itertools math operator random re statistics string"
)

FOLDER = "/tmp"  # of the program, where the level has namespaces
TICK_S = 0.02  # between two measurements of processor time and memory
NOBODY = 65534
COMPILE_S, COMPILE_MB = 10.0, 512  # of a compiler, at least
SOURCES = {"python": "main.py", "bash": "main.sh", "c": "main.c", "cpp": "main.cpp", "javascript": "main.js"}

_CLONE_NAMESPACES = 0x20000 | 0x08000000 | 0x20000000  # mounts, IPC, processes
_CLONE = {"x86_64": 56, "aarch64": 220}
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER, _AMBIENT, _CLEAR_ALL, _SUBREAPER, _CAPABILITY_VERSION = 38, 22, 2, 47, 4, 36, 0x20080522
_NOSUID, _NODEV, _READ_ONLY, _PRIVATE, _RECURSIVE = 2, 4, 1, 1 << 18, 1 << 14  # mount flags

_libc = ctypes.CDLL(None, use_errno=True)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _SystemCallFilter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


_HEADER, _NO_CAPABILITIES = _CapabilityHeader(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What the launcher decides."""

    namespaces: bool  # whether this process may make them
    switches_user: bool  # whether this process is root of its namespace, and programs are another user
    filter: str  # of system calls, base64; "" for none
    commands: Mapping[str, str]  # interpreters and compilers by language
    paths: tuple[str, ...] = ()  # appended to sys.path of Python programs


@dataclass
class Usage:
    """What the processes of a job use together."""

    cpu_s: float = 0.0
    memory: int = 0  # bytes


@dataclass
class ProcessOutcome:
    """How one process ended, and what it wrote."""

    reason: str = "exit"
    status: int = 0
    streams: dict[str, bytes] = field(default_factory=dict)
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def reply(self) -> dict[str, Any]:
        texts = {name: text.decode("utf-8", "replace") for name, text in self.streams.items()}
        return {"reason": self.reason, "exit_code": self.status, "wall_s": self.wall_s, "cpu_s": self.cpu_s, **texts}


class CallerGone(Exception):
    """The process that asked has closed the channel."""


def main() -> None:
    """Answer one job after the other until the channel closes."""
    settings = WorkerSettings(**json.loads(sys.argv[2]))
    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller
    sys.path.extend(settings.paths)
    for module in WARM.split():
        __import__(module)
    gc.freeze()  # so that a fork copies fewer pages
    site.setquit()  # exit() and quit(), without the packages of the interpreter
    _send(channel, {"ready": os.getpid()})
    while channel.recv(1, socket.MSG_PEEK):  # the job reads the message itself
        job = _fork_job(settings.namespaces)
        if job == 0:
            _exit_after(_run_job, channel, settings)
        _, status = os.waitpid(job, 0)
        if status:
            _send(channel, {"died": os.waitstatus_to_exitcode(status)})


def _exit_after(function: Any, *arguments: Any) -> NoReturn:
    status = 70
    try:
        function(*arguments)
        status = 0
    except CallerGone:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _fork_job(namespaces: bool) -> int:
    if not namespaces:
        return os.fork()
    child: int = _libc.syscall(_CLONE[os.uname().machine], _CLONE_NAMESPACES | signal.SIGCHLD, 0, 0, 0, 0)
    if child < 0:
        raise OSError(ctypes.get_errno(), "the kernel refused new namespaces")
    return child


# --- the job ----------------------------------------------------------------------------------------------------------------


class Job:
    """One request: its folder, its processes, its limits."""

    def __init__(self, channel: socket.socket, settings: WorkerSettings, request: dict[str, Any]) -> None:
        self.channel, self.settings, self.request = channel, settings, request
        self.limits: dict[str, Any] = request["limits"]
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)  # of the worker's namespace; programs have none
        self.myself = int(os.readlink("self", dir_fd=self.proc))
        self.folder = FOLDER
        if settings.namespaces:
            self._mount()
        else:
            _libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # orphans of the program become children of this process, which ends them
            self.folder = tempfile.mkdtemp(prefix="strop_sandbox_")

    def _mount(self) -> None:
        extra = sum(
            len(_encode(text)) for text in [self.request["source"], self.request["stdin"], *self.request["files"].values()]
        )
        size = (self.limits["disk_mb"] << 20) + extra + (1 << 16)
        _mount("none", "/", None, _RECURSIVE | _PRIVATE, "")
        inodes = 64 * self.limits["disk_mb"] + 64
        _mount("tmpfs", FOLDER, "tmpfs", _NOSUID | _NODEV, f"size={size},nr_inodes={inodes},mode=0700,uid={NOBODY},gid={NOBODY}")
        _mount("tmpfs", "/proc", "tmpfs", _NOSUID | _NODEV | _READ_ONLY, "size=4096,nr_inodes=2,mode=0555")

    def close(self) -> None:
        self.end_all()
        if not self.settings.namespaces:
            shutil.rmtree(self.folder, ignore_errors=True)

    def signal_all(self, number: int) -> None:
        if self.settings.namespaces:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number)  # all in this namespace but this process
        else:
            for process in self.processes():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, number)

    def end_all(self) -> None:
        """Kill and reap every process of the job."""
        with contextlib.suppress(ChildProcessError):
            while True:
                self.signal_all(signal.SIGKILL)
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.0005)

    def processes(self) -> list[int]:
        """The processes of the job, as this process' /proc numbers them."""
        if self.settings.namespaces:  # everything but the worker and this process
            return [int(name) for name in os.listdir(self.proc) if name.isdigit() and int(name) not in (1, self.myself)]
        found, ahead = [], [self.myself]
        while ahead:
            children = self._read(f"{(parent := ahead.pop())}/task/{parent}/children").split()
            found += [int(child) for child in children]
            ahead += [int(child) for child in children]
        return found

    def measure(self) -> Usage:
        usage = Usage(_children_cpu_s())
        for process in self.processes():
            fields = self._read(f"{process}/stat").rpartition(b")")[2].split()
            usage.cpu_s += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            sizes = [line.split() for line in self._read(f"{process}/smaps_rollup").splitlines()]
            usage.memory += sum(int(words[1]) << 10 for words in sizes if words and words[0] in (b"Pss:", b"SwapPss:"))
        return usage

    def _read(self, name: str) -> bytes:
        try:
            descriptor = os.open(name, os.O_RDONLY, dir_fd=self.proc)
            try:
                return os.read(descriptor, 1 << 16)
            finally:
                os.close(descriptor)
        except OSError:  # it has just ended
            return b""


def _run_job(channel: socket.socket, settings: WorkerSettings) -> None:
    request = _receive(channel)
    job = Job(channel, settings, request)
    try:
        if request["session"]:
            _run_session(job)
        else:
            reply = _run_program(job).reply()
            job.close()
            _send(channel, reply)
    finally:
        job.close()


def _run_program(job: Job) -> ProcessOutcome:
    language, binary = job.request["language"], f"{job.folder}/program"
    command = job.settings.commands[language]
    source = f"{job.folder}/{SOURCES[language]}"
    if language in ("c", "cpp"):
        standard = "-std=gnu11" if language == "c" else "-std=gnu++17"
        compiled = _compile(job, [command, standard, "-O2", "-o", binary, source, "-lm"])
        if compiled.reason != "exit" or compiled.status:
            if compiled.reason != "exit":
                compiled.streams["stderr"] += f"\nthe compiler was ended by the limit: {compiled.reason}\n".encode()
            compiled.reason = "compile"
            return compiled
        return Process(job, exec_command=[binary]).finish()
    if language == "python":
        return Process(job, writes_files=True).finish()
    return Process(job, exec_command=[command, source], writes_files=True).finish()


def _compile(job: Job, command: list[str]) -> ProcessOutcome:
    job.limits, own = {**job.limits}, job.limits
    job.limits["wall_s"] = job.limits["cpu_s"] = max(COMPILE_S, own["cpu_s"])
    job.limits["memory_mb"], job.limits["file_mb"] = max(COMPILE_MB, own["memory_mb"]), max(32, own["file_mb"])
    job.limits["processes"] = max(16, own["processes"])
    outcome = Process(job, exec_command=command, writes_files=True).finish()
    job.end_all()
    job.limits = own
    return outcome


def _run_session(job: Job) -> None:
    """Answer calls until one reaches a limit, the interpreter dies, or the caller closes the session."""
    process = Process(job, session=True)
    request = job.request
    while True:
        outcome = process.call(request["source"], request["wall_s"])
        alive = process.alive
        if not alive:
            job.close()
        _send(job.channel, {**outcome.reply(), "alive": alive, "held": job.measure().memory if alive else 0})
        if not alive:
            return
        job.signal_all(signal.SIGSTOP)  # between calls, nothing of it runs
        request = _receive(job.channel)
        if request.get("close"):
            job.close()
            _send(job.channel, {"closed": True})
            return
        job.signal_all(signal.SIGCONT)


class Process:
    """The program, and the pipes to it."""

    def __init__(
        self, job: Job, *, exec_command: list[str] | None = None, writes_files: bool = False, session: bool = False
    ) -> None:
        self.job, self.alive = job, True
        self.began, self.cpu_before = time.monotonic(), _children_cpu_s()
        pipes = {name: os.pipe() for name in ("stdout", "stderr")}
        self.commands, self.answers = os.pipe() if session else (-1, -1), os.pipe() if session else (-1, -1)
        self.pid = os.fork()
        if self.pid == 0:
            descriptors = [pipes["stdout"][1], pipes["stderr"][1]]
            descriptors += [self.commands[0], self.answers[1]] if session else []
            _exit_after(_become_program, job, descriptors, exec_command, writes_files or session)
        for _, end in pipes.values():
            os.close(end)
        if session:
            os.close(self.commands[0])
            os.close(self.answers[1])
        self.pipes = {reading: name for name, (reading, _) in pipes.items()}
        self.handle = os.pidfd_open(self.pid)

    def finish(self) -> ProcessOutcome:
        """Wait for the end of the program or the first limit, end what it left, and say what happened."""
        limits = self.job.limits
        outcome = self._watch(limits["wall_s"], limits["cpu_s"])
        return self._close(outcome)

    def call(self, source: str, wall_s: float) -> ProcessOutcome:
        """Let the interpreter of a session run ``source``."""
        text = _encode(source)
        before = self.job.measure().cpu_s
        try:
            _write_all(self.commands[1], struct.pack("<I", len(text)) + text, time.monotonic() + wall_s)
        except OSError:
            return self._close(ProcessOutcome(streams={"stdout": b"", "stderr": b""}))
        outcome = self._watch(wall_s, before + self.job.limits["cpu_s"], self.answers[0])
        outcome.cpu_s -= before
        if outcome.reason != "exit" or not self.alive:
            return self._close(outcome)
        return outcome

    def _watch(self, wall_s: float, cpu_s: float, answers: int | None = None) -> ProcessOutcome:
        outcome = ProcessOutcome(streams={"stdout": b"", "stderr": b""})
        began = time.monotonic()
        poll = select.poll()
        for descriptor in (*self.pipes, self.handle, *([answers] if answers is not None else ())):
            poll.register(descriptor, select.POLLIN)
        poll.register(self.job.channel.fileno(), select.POLLRDHUP)
        measured = 0.0
        while outcome.reason == "exit":
            ready = dict(poll.poll(1000 * TICK_S))
            for descriptor in ready.keys() & self.pipes.keys():
                if not self._read(descriptor, outcome):
                    poll.unregister(descriptor)
            now = time.monotonic()
            if self.job.channel.fileno() in ready:
                raise CallerGone
            if self.handle in ready:
                self.alive = False
                break
            if answers in ready:
                answer = os.read(answers, 4)  # type: ignore[arg-type]
                if len(answer) == 4:
                    outcome.status = struct.unpack("<i", answer)[0]
                    break
            if now - began > wall_s:
                outcome.reason = "time"
            if outcome.reason == "exit" and now - measured >= TICK_S:
                measured = now
                self._measure(outcome, cpu_s)
        self._drain(outcome)
        outcome.wall_s = time.monotonic() - began
        outcome.cpu_s = self.job.measure().cpu_s if self.alive and outcome.reason == "exit" else outcome.cpu_s
        return outcome

    def _measure(self, outcome: ProcessOutcome, cpu_s: float) -> None:
        """Note in the outcome if the job's processes use too much."""
        usage = self.job.measure()
        outcome.cpu_s = usage.cpu_s
        if usage.cpu_s > cpu_s:
            outcome.reason = "time"
        elif usage.memory > self.job.limits["memory_mb"] << 20:
            outcome.reason = "memory"

    def _read(self, descriptor: int, outcome: ProcessOutcome) -> bool:
        """Read what there is of a stream. False at its end."""
        name, most = self.pipes[descriptor], self.job.limits["output_kb"] << 10
        part = os.read(descriptor, 1 << 16)
        room = most - len(outcome.streams[name])
        outcome.streams[name] += part[:room]
        if len(part) > room and outcome.reason == "exit":
            outcome.reason = "output"
        return bool(part)

    def _drain(self, outcome: ProcessOutcome) -> None:
        """Read what the pipes still hold, at most once their size."""
        for descriptor in self.pipes:
            for _ in range(17):
                if not select.select([descriptor], [], [], 0)[0] or not self._read(descriptor, outcome):
                    break

    def _close(self, outcome: ProcessOutcome) -> ProcessOutcome:
        """End all processes, and complete the outcome with how the program ended."""
        self.alive = False
        killed = outcome.reason != "exit"
        self.job.signal_all(signal.SIGKILL if killed else 0)
        _, status = os.waitpid(self.pid, 0)
        self.job.end_all()
        self._drain(outcome)
        outcome.cpu_s = _children_cpu_s() - self.cpu_before
        outcome.wall_s = time.monotonic() - self.began
        outcome.status = os.waitstatus_to_exitcode(status)
        if outcome.reason == "exit" and outcome.status < 0:
            used_up = outcome.status == -signal.SIGXCPU or (
                outcome.status == -signal.SIGKILL and outcome.cpu_s >= self.job.limits["cpu_s"]
            )
            outcome.reason = "time" if used_up else "signal"
        for descriptor in (*self.pipes, self.handle, self.commands[1], self.answers[0]):
            if descriptor >= 0:
                os.close(descriptor)
        return outcome


# --- in the program's process -----------------------------------------------------------------------------------------------


def _become_program(job: Job, descriptors: list[int], command: list[str] | None, writes_files: bool) -> None:
    """Give up every privilege, then run the program."""
    request, settings, folder = job.request, job.settings, job.folder
    os.setpgid(0, 0)  # so that a signal to its group does not reach the worker; a session would cost milliseconds
    _write_file(job.proc, "self/oom_score_adj", "1000")
    for place, descriptor in enumerate([os.dup(descriptor) for descriptor in descriptors]):
        os.dup2(descriptor, 100 + place)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for place in range(len(descriptors)):
        os.dup2(100 + place, 1 + place)
    os.closerange(1 + len(descriptors), 1 << 16)
    if settings.switches_user:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if settings.namespaces:
        _drop_capabilities()
    os.umask(0o077)
    os.chdir(folder)
    if writes_files:
        _write_program(request)
    if not request["session"]:
        _open_stdin(request["stdin"])
    _set_limits(
        job.limits, settings, session=request["session"], measured_only=command is not None and request["language"] != "bash"
    )
    os.environ.update(HOME=folder, TMPDIR=folder)
    if command is None:
        _prepare_python("<session>" if request["session"] else "main.py")
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if settings.filter:
        _install(base64.b64decode(settings.filter))
    source, language = request["source"], request["language"]
    request.clear()
    if command is not None:
        os.execv(command[0], command)
    if language != "python":
        raise ValueError(language)
    if len(descriptors) > 2:
        _serve_session()
    else:
        os._exit(_run_python(source))


def _drop_capabilities() -> None:
    _libc.prctl(_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    if _libc.capset(ctypes.byref(_HEADER), ctypes.byref(_NO_CAPABILITIES)):
        raise OSError(ctypes.get_errno(), "capset")


def _write_program(request: dict[str, Any]) -> None:
    for name, text in {**request["files"], SOURCES[request["language"]]: request["source"]}.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass", newline="")


def _open_stdin(text: str) -> None:
    if not text:
        return
    path = Path(".stdin")
    path.write_text(text, encoding="utf-8", errors="surrogatepass", newline="")
    os.dup2(os.open(path, os.O_RDONLY), 0)
    path.unlink()
    os.closerange(3, 16)


def _set_limits(limits: dict[str, Any], settings: WorkerSettings, *, session: bool, measured_only: bool) -> None:
    """Limits by the kernel. Those of all processes together are the job's to measure; these stop a single one sooner."""
    seconds = max(1, int(limits["cpu_s"] + 0.999))
    values = {
        resource.RLIMIT_CORE: 1,  # with 0 the kernel would still start a handler that core_pattern pipes to, as root
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_FSIZE: limits["file_mb"] << 20,
        resource.RLIMIT_NPROC: limits["processes"] + (0 if settings.switches_user else 2),  # the worker and the job count too
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 1024,
    }
    if not session:
        values[resource.RLIMIT_CPU] = seconds
    if not measured_only:  # compilers and engines of JavaScript reserve far more than they use
        values[resource.RLIMIT_AS] = max(4 * limits["memory_mb"], limits["memory_mb"] + 512) << 20
    if not settings.namespaces:
        del values[resource.RLIMIT_NPROC]  # it would count all processes of this user
    for limit, value in values.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value + 1 if limit == resource.RLIMIT_CPU else value))


def _install(code: bytes) -> None:
    if _libc.prctl(_SECCOMP, _FILTER, ctypes.byref(_SystemCallFilter(len(code) // 8, code)), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refused the filter of system calls")


def _run_python(source: str) -> int:
    """Run a program as ``python main.py`` would. Return its exit code."""
    module = sys.modules["__main__"]
    with _outcome_of_code() as box:
        exec(compile(source, "main.py", "exec", dont_inherit=True), module.__dict__)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    _flush()
    return box[0] & 255


def _serve_session() -> NoReturn:
    """Run the sources that come over descriptor 3, in one namespace, and answer each with its exit code over descriptor 4."""
    commands, answers = os.fdopen(3, "rb", 0), 4
    module = sys.modules["__main__"]
    count = 0
    while header := commands.read(4):
        size, text = struct.unpack("<I", header)[0], b""
        while len(text) < size:
            text += commands.read(size - len(text))
        count += 1
        with _outcome_of_code() as box:
            _run_cell(text.decode("utf-8", "surrogatepass"), f"<call {count}>", module)
        _flush()
        os.write(answers, struct.pack("<i", box[0]))
    os._exit(0)


def _run_cell(source: str, name: str, module: types.ModuleType) -> None:
    """Run statements; show the value of the last one if it is an expression, as a notebook does."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    exec(compile(tree, name, "exec", dont_inherit=True), module.__dict__)
    if last:
        exec(compile(ast.Interactive(last), name, "single", dont_inherit=True), module.__dict__)  # type: ignore[arg-type]


def _prepare_python(file: str) -> None:
    """Give this interpreter the state of a fresh one."""
    random.seed(0)  # the same program gives the same result
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module = types.ModuleType("__main__")
    module.__dict__["__file__"] = file
    sys.modules["__main__"] = module
    sys.argv, sys.path[:] = [file], [os.getcwd(), *sys.path]
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115


@contextlib.contextmanager
def _outcome_of_code() -> Iterator[list[int]]:
    box = [0]
    try:
        yield box
    except SystemExit as leaving:
        if isinstance(leaving.code, int):
            box[0] = leaving.code
        elif leaving.code is not None:
            sys.stderr.write(f"{leaving.code}\n")
            box[0] = 1
    except BaseException as error:
        box[0] = 1
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename == __file__:
            own = own.tb_next
        with contextlib.suppress(BaseException):
            traceback.print_exception(type(error), error, own)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()


# --- small things -----------------------------------------------------------------------------------------------------------


def _mount(source: str, target: str, kind: str | None, flags: int, options: str) -> None:
    name = kind.encode() if kind else None
    if _libc.mount(source.encode(), target.encode(), name, ctypes.c_ulong(flags), options.encode()):
        raise OSError(ctypes.get_errno(), f"mount of {target}")


def _encode(text: str) -> bytes:
    """Return a text as UTF-8. A lone surrogate, which JSON can carry, is for the program to stumble over."""
    return text.encode("utf-8", "surrogatepass")


def _write_file(folder: int, name: str, text: str) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(name, os.O_WRONLY, dir_fd=folder)
        os.write(descriptor, text.encode())
        os.close(descriptor)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _write_all(descriptor: int, data: bytes, deadline: float) -> None:
    os.set_blocking(descriptor, False)
    while data:
        if not select.select([], [descriptor], [], max(0.0, deadline - time.monotonic()))[1]:
            raise TimeoutError
        data = data[os.write(descriptor, data) :]


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    channel.sendall(struct.pack("<I", len(text)) + text)


def _receive(channel: socket.socket) -> dict[str, Any]:
    size = struct.unpack("<I", _receive_exactly(channel, 4))[0]
    message: dict[str, Any] = json.loads(_receive_exactly(channel, size))
    return message


def _receive_exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(min(size - len(data), 1 << 20))
        if not part:
            raise CallerGone
        data += part
    return bytes(data)


if __name__ == "__main__":
    main()
