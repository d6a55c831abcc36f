"""Starts ``sandbox_worker.py``, inside bubblewrap where the level is ``namespaces``."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from strop.extensions.code.sandbox.base import SandboxError
from strop.extensions.code.sandbox.sandbox_config import SandboxConfig, SandboxLevel, find_missing
from strop.extensions.sandboxes.local.bubblewrap import Cgroup, make_cgroup, start_bubblewrap
from strop.safety.confinement import NAMESPACES, NOBODY, build_confining_filter, build_program_filter, show_system

COMMANDS = {"bash": "bash", "c": "gcc", "cpp": "g++", "javascript": "node"}
LANGUAGES = ("python", *COMMANDS)
PACKAGES = {"bash": "bash", "c": "gcc", "cpp": "g++", "javascript": "nodejs"}  # of Debian

START_TIMEOUT_S = 60.0
_WORKER = Path(__file__).with_name("sandbox_worker.py")
_USERS = 0x70000000  # programs run as this user and the worker's process number, which is no user of any machine
_OWN_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # of each program, empty when it starts


class WorkerDied(Exception):
    """The worker's process is gone, or does not answer."""

    lost_state = False  # an interpreter with variables of earlier calls


class SandboxWorker:
    """A worker process and the channel to it. One call at a time."""

    def __init__(self, config: SandboxConfig) -> None:
        check_level(config.level)
        self.channel, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        self.cgroup: Cgroup | None = make_cgroup() if config.level == "namespaces" else None
        try:
            with theirs:
                self.process = _start(config, theirs.fileno(), self._errors, self.cgroup)
            self.pid = self.receive(START_TIMEOUT_S)["ready"]
        except (WorkerDied, OSError) as error:
            text = self._read_errors()
            self.close()
            raise SandboxError(
                f"a sandbox of level {config.level} did not start: {text or error}. `strop sandbox check` says why"
            ) from error
        except BaseException:
            self.close()
            raise

    def call(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a message and return the answer. Raises WorkerDied."""
        text = json.dumps(message, ensure_ascii=True).encode()
        self.channel.settimeout(timeout_s)
        try:
            self.channel.sendall(struct.pack("<I", len(text)) + text)
        except OSError as error:
            raise WorkerDied(str(error)) from error
        return self.receive(timeout_s)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        size = struct.unpack("<I", self._receive_exactly(4, deadline))[0]
        answer: dict[str, Any] = json.loads(self._receive_exactly(size, deadline))
        return answer

    def _receive_exactly(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self.channel.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                part = self.channel.recv(size - len(data))
            except OSError as error:
                raise WorkerDied(f"no answer: {error}") from error
            if not part:
                raise WorkerDied("it closed the channel")
            data += part
        return bytes(data)

    def _read_errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read(2000).decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Kill the worker; everything in its namespace dies with it."""
        self.channel.close()
        process = getattr(self, "process", None)
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)  # an idle one exits by itself, and one that works ends its job first
            process.kill()
            process.wait()
        self._errors.close()
        if self.cgroup is not None:
            self.cgroup.remove()


def check_level(level: SandboxLevel) -> None:
    """Raise SandboxError if this machine cannot have a level; the message names what is missing and what to set."""
    if missing := find_missing(level):
        raise SandboxError(missing)


def find_commands() -> dict[str, str]:
    """Return the interpreter or compiler of each language that this machine has."""
    found = {language: shutil.which(command, path="/usr/bin:/bin") for language, command in COMMANDS.items()}
    return {"python": sys.executable, **{language: path for language, path in found.items() if path}}


def _start(config: SandboxConfig, channel: int, errors: Any, cgroup: Cgroup | None) -> subprocess.Popen[bytes]:
    namespaces = config.level == "namespaces"
    as_root = namespaces and os.geteuid() == 0
    python = str(Path(sys.base_prefix, "bin", Path(os.path.realpath(sys.executable)).name))
    paths = tuple({sysconfig.get_paths()[name]: None for name in ("purelib", "platlib")}) if config.site_packages else ()
    code = {"namespaces": build_program_filter, "seccomp": build_confining_filter, "limits": bytes}[config.level]()
    settings = {
        "namespaces": namespaces,
        "switches_user": as_root,
        "filter": base64.b64encode(code).decode(),
        "commands": find_commands(),
        "paths": paths,
    }
    worker = str(_WORKER)
    if namespaces:
        settings["paths"] = tuple(map(_shown_at, paths))
        python, worker = _shown_at(python), _shown_at(worker)
    command = [python, "-P", "-s", "-S", "-B", "-X", "utf8", worker, str(channel), json.dumps(settings)]
    environment = {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
    }
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors, "env": environment}
    if not namespaces:
        return subprocess.Popen(command, pass_fds=(channel,), start_new_session=True, **options)
    command = [str(shutil.which("bwrap")), *_bubblewrap_options(paths), *command]
    if cgroup is not None:
        command = [*cgroup.entering, *command]
    if not as_root:
        return subprocess.Popen(command, pass_fds=(channel,), **options)
    # root, who prepares each job, and a user that exists nowhere, who runs the program
    return start_bubblewrap(command, (channel,), options, lambda child: [_map(_USERS + child), _map(NOBODY)])[0]


def _map(user: int) -> str:
    return f"0 0 1\n{NOBODY} {user} 1\n"


def _bubblewrap_options(paths: tuple[str, ...]) -> list[str]:
    """Nothing of this machine but /usr and the interpreter, read-only; no network; no process of the machine in sight."""
    options = [*NAMESPACES, "--cap-drop", "ALL"]
    capabilities = ["SYS_ADMIN", "KILL", "SYS_PTRACE", "SYS_RESOURCE"]  # of the worker, in its namespace; programs have none
    if os.geteuid() == 0:
        capabilities += ["SETUID", "SETGID"]
    else:
        options += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    for name in capabilities:
        options += ["--cap-add", f"CAP_{name}"]
    shown = show_system((*paths, str(_WORKER)), _shown_at)
    options += [*shown, "--perms", "0755", "--dir", "/tmp", "--symlink", "/tmp", "/dev/shm"]
    return [*options, "--perms", "0755", "--dir", "/var", "--symlink", "/tmp", "/var/tmp", "--remount-ro", "/", "--chdir", "/"]


def _shown_at(path: str) -> str:
    """Where a program finds a path of this machine: in its own place, unless the program has its own folder there."""
    return f"/opt/shown{path}" if path.startswith(tuple(f"{folder}/" for folder in _OWN_FOLDERS)) else path
