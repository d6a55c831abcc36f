"""Sandboxes of this machine: bubblewrap, the layers of an image by overlayfs, files in memory, no daemon and no privileges needed.

    this process -> sh (removes the control group at the end) -> bwrap -> sandbox_init.py -> commands

A command's pipes go to it as descriptors, so its output does not pass through another process. When this process ends for whatever reason,
the channel closes, the first process of the sandbox exits, and the kernel removes its processes, mounts and files.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import py_compile
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.extensions.sandboxes.base import (
    Capabilities,
    CommandResult,
    ExitReason,
    FailureCause,
    Health,
    OnOutput,
    SandboxCommand,
    SandboxFailure,
    SandboxSpec,
    UnsupportedSpec,
    check_spec,
)
from strop.extensions.sandboxes.images.layers import LayerLimits, Owners
from strop.extensions.sandboxes.images.store import ImageStore, UnpackedImage
from strop.extensions.sandboxes.local.bubblewrap import Cgroup, make_cgroup, start_bubblewrap
from strop.extensions.sandboxes.local.egress_proxy import PROXY_PORT, EgressProxy, forward
from strop.extensions.sandboxes.local.streams import Streams, collect
from strop.safety.confinement import NAMESPACES, build_program_filter, show_system
from strop.storage.files import user_cache_folder

START_S = 30.0  # until a sandbox is ready, its image being here
GRACE_S = 20.0  # after a limit, on a busy machine
USERS = 0x60000000  # user n of images is this + n outside, which is no user of any machine
_INIT = Path(__file__).with_name("sandbox_init.py")
_CAPABILITIES = (
    "SYS_ADMIN SYS_PTRACE SYS_RESOURCE SETPCAP SETFCAP SETUID SETGID KILL CHOWN DAC_OVERRIDE FOWNER FSETID NET_BIND_SERVICE"
)
# What programs of an image may call that a single program may not: sockets, and memory that the control group counts.
_CALLS = ("socket", "memfd_create", "shmget", "shmat", "semget", "msgget", "mq_open", "personality", "sync", "syncfs", "fadvise64",
          "inotify_init", "inotify_init1", "inotify_add_watch")  # fmt: skip
_WRAPPER = '"$@"; for group in $GROUPS_LEFT; do for i in 1 2 3 4 5 6 7 8 9; do rmdir "$group" && break; sleep 0.02; done; done 2>/dev/null'
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """Options of ``sandboxes.provider: local``."""

    folder: str = ""  # of unpacked images; "": in the user's cache
    cache_gb: float = 50.0  # of images that are not in use
    max_image_mb: int = 20_000  # of one image, unpacked


def can_map_users() -> bool:
    """Whether the users of an image can exist in a sandbox: this process is root of the machine, not of a container with few users."""
    if os.geteuid() != 0:
        return False
    rows = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(int(first) <= USERS and int(first) + int(count) >= USERS + 65536 for first, _, count in rows)


class LocalProvider:
    """Makes sandboxes in bubblewrap."""

    name = "local"
    options_type = LocalOptions

    def __init__(self, options: LocalOptions = LocalOptions()) -> None:
        if sys.platform != "linux" or shutil.which("bwrap") is None:
            raise UnsupportedSpec(
                "sandboxes.provider=local needs Linux and bubblewrap (apt-get install bubblewrap); or set another provider"
            )
        self.many_users = can_map_users()
        self.store = ImageStore(
            Path(options.folder) if options.folder else user_cache_folder() / "images",
            limit_mb=int(options.cache_gb * 1000),
            limits=LayerLimits(total_mb=options.max_image_mb),
            owners=Owners(base=USERS if self.many_users else None),
        )
        self.capabilities = Capabilities(
            egress=frozenset({"none", "allow", "all"}), forward=True, snapshot=True, users=self.many_users, limits_disk=True,
            limits_processes=True,
        )  # fmt: skip
        digest = hashlib.sha256(_INIT.read_bytes()).hexdigest()[:16]
        self.init = str(self.store.folder / f"init-{sys.implementation.cache_tag}-{digest}.pyc")
        if not Path(self.init).exists():
            py_compile.compile(str(_INIT), self.init, doraise=True)  # once, not in each sandbox
        self._threads = ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0))), thread_name_prefix="sandbox_start")
        self._open: set[LocalSandbox] = set()

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        check_spec(spec, self.name, self.capabilities)
        loop = asyncio.get_running_loop()
        image = await loop.run_in_executor(self._threads, self.store.get, spec.image)
        starting = loop.run_in_executor(self._threads, self._start, spec, image)
        try:
            started = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_end_unused)
            raise
        sandbox = LocalSandbox(started, spec, self)
        self._open.add(sandbox)
        await sandbox.open_ports()
        return sandbox

    def _start(self, spec: SandboxSpec, image: UnpackedImage) -> _Started:
        try:
            return _Started(spec, image, self.many_users, self.init)
        except BaseException:
            image.release()
            raise

    def forget(self, sandbox: LocalSandbox) -> None:
        self._open.discard(sandbox)

    async def remove_snapshot(self, image: str) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self.store.remove_snapshot, image)

    async def remove_left_over(self) -> int:
        """Nothing outlives its run but a control group whose ``sh`` was killed, which the next sandbox removes."""
        return 0

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.destroy() for sandbox in list(self._open)))
        self._threads.shutdown(wait=False)


class _Started:
    """The processes of a sandbox, and the channel to the first one inside. Made in a thread."""

    def __init__(self, spec: SandboxSpec, image: UnpackedImage, many_users: bool, init: str) -> None:
        self.init, self.image, self.id = init, image, f"strop_{os.getpid()}_{next(_numbers)}"
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.cgroup: Cgroup | None = make_cgroup()
        self.child_handle, self.ports = -1, [PROXY_PORT] * (spec.network.egress != "none") + list(spec.network.forward)
        self.listeners: list[socket.socket] = []
        with theirs, tempfile.TemporaryFile() as errors:
            try:
                if self.cgroup is not None:
                    files = spec.resources.disk_mb  # which are in memory: full, they must not count against programs
                    self.cgroup.limit(spec.resources.memory_mb + files, spec.resources.processes)
                command = self._command(spec, theirs.fileno(), many_users)
                groups = {self.cgroup.memory, self.cgroup.pids} if self.cgroup else set()
                environment = {
                    "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
                    "GROUPS_LEFT": " ".join(map(str, groups)),
                    "LANG": "C.UTF-8",
                }
                options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors, "env": environment}
                maps = (lambda child: [f"0 {USERS} 65536\n65536 0 1\n"]) if many_users else None
                self.process, child = start_bubblewrap(command, (theirs.fileno(),), {**options, "start_new_session": True}, maps)
                with suppress(ProcessLookupError):
                    self.child_handle = os.pidfd_open(child)
                theirs.close()
                self._receive_ready()
            except (OSError, ValueError) as error:
                errors.seek(0)
                why = errors.read(2000).decode("utf-8", "replace").strip() or str(error)
                self.end()
                cause = FailureCause.SLOW if isinstance(error, TimeoutError) else FailureCause.REFUSED
                raise SandboxFailure(
                    cause, f"a sandbox of {image.reference} did not start: {why}; try strop sandbox check"
                ) from error

    def _command(self, spec: SandboxSpec, channel: int, many_users: bool) -> list[str]:
        memory_mb = 0 if self.cgroup is not None else spec.resources.memory_mb
        settings = {
            "layers": [f"/layers/{number}" for number in range(len(self.image.layers))],
            "disk_mb": spec.resources.disk_mb,
            "filter": build_program_filter(_CALLS).hex(),
            "ports": self.ports,
            "many_users": many_users,
            "processes": spec.resources.processes,
            "memory_mb": memory_mb,
        }
        python = str(Path(sys.base_prefix, "bin", Path(os.path.realpath(sys.executable)).name))
        shown = show_system(())
        for number, layer in enumerate(self.image.layers):
            shown += ["--ro-bind", str(layer), f"/layers/{number}"]
        shown += ["--ro-bind", self.init, "/sandbox_init.pyc", "--dir", "/state", "--dir", "/image", "--dev", "/dev"]
        options = [*NAMESPACES, "--hostname", "sandbox", "--cap-drop", "ALL"]
        for name in _CAPABILITIES.split():
            options += ["--cap-add", f"CAP_{name}"]
        as_nobody = [] if many_users else ["--uid", "0", "--gid", "0"]
        init = [python, "-I", "-S", "-B", "-X", "utf8", "/sandbox_init.pyc", str(channel), json.dumps(settings)]
        entering = self.cgroup.entering if self.cgroup is not None else []
        bubblewrap = [str(shutil.which("bwrap")), *options, *as_nobody, *shown, "--chdir", "/"]
        return ["/bin/sh", "-c", _WRAPPER, "sh", *entering, *bubblewrap, *init]

    def _receive_ready(self) -> None:
        self.channel.settimeout(START_S)
        packet, descriptors, _, _ = socket.recv_fds(self.channel, 1 << 16, 16)
        self.listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        if not packet or len(self.listeners) != len(self.ports):
            raise OSError("its first process ended")
        self.overlay = bool(json.loads(packet)["overlay"])
        self.channel.setblocking(False)

    def end(self) -> None:
        """Close the channel, which ends the sandbox, and wait. Blocks."""
        self.channel.close()
        for listener in self.listeners:
            listener.close()
        process = getattr(self, "process", None)
        if process is not None:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                if self.child_handle >= 0:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(self.child_handle, signal.SIGKILL)
                process.wait()
        if self.child_handle >= 0:
            os.close(self.child_handle)
            self.child_handle = -1
        if self.cgroup is not None:
            self.cgroup.remove()
        self.image.release()


def _end_unused(starting: asyncio.Future[_Started]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().end()


class LocalSandbox:
    """A sandbox in bubblewrap."""

    def __init__(self, started: _Started, spec: SandboxSpec, provider: LocalProvider) -> None:
        self.id, self._started, self._spec, self._provider = started.id, started, spec, provider
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._requests = itertools.count()
        self._servers: list[asyncio.Server] = []
        self._lost = ""
        self._ending: asyncio.Future[None] | None = None
        self._loop.add_reader(started.channel.fileno(), self._receive)

    async def open_ports(self) -> None:
        """Listen in the sandbox: the proxy that applies its network policy, and the ports that are forwarded."""
        network = self._spec.network
        for port, listener in zip(self._started.ports, self._started.listeners, strict=True):
            listener.setblocking(False)
            handler = EgressProxy(network).serve if port == PROXY_PORT and network.egress != "none" else forward(port)
            self._servers.append(await asyncio.start_server(handler, sock=listener))

    @property
    def environment(self) -> dict[str, str]:
        found = {**self._started.image.config.environment, **self._spec.environment}
        if self._spec.network.egress != "none":
            proxy = f"http://127.0.0.1:{PROXY_PORT}"
            found |= dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), proxy)
            found |= {"no_proxy": "localhost,127.0.0.1", "NO_PROXY": "localhost,127.0.0.1"}
        return found

    async def exec(self, command: SandboxCommand, on_output: OnOutput | None = None) -> CommandResult:
        config = self._started.image.config
        request = {
            "do": "exec",
            "argv": list(command.argv),
            "environment": {**self.environment, **command.environment},
            "cwd": command.cwd or config.workdir,
            "user": command.user or config.user,
        }
        began, kills = time.monotonic(), self._count_kills()
        streams = Streams(command.stdin, command.output_kb << 10, on_output)
        try:
            answer, reason = await self._run(request, streams.theirs, command.wall_s, streams)
        finally:
            found = streams.close()
        if "refused" in answer:
            raise SandboxFailure(FailureCause.REQUEST, f"the command {command.argv[0]!r:.100} cannot start: {answer['refused']}")
        if "full" in answer:  # the policy's own processes are in the way
            return CommandResult(reason=ExitReason.EXIT, exit_code=126, stderr=str(answer["full"]).encode())
        status = int(answer["status"])
        if reason == ExitReason.EXIT and status < 0:
            out_of_memory = answer["memory"] or self._count_kills() > kills
            reason = ExitReason.MEMORY if out_of_memory else ExitReason.SIGNAL
        return CommandResult(reason=reason, exit_code=status, wall_s=time.monotonic() - began, **found)

    def _count_kills(self) -> int:
        with suppress(OSError):  # the group is gone with its sandbox
            return self._started.cgroup.count_kills() if self._started.cgroup else 0
        return 0

    async def _run(
        self, request: Mapping[str, Any], descriptors: Sequence[int], wall_s: float, streams: Streams | None = None
    ) -> tuple[dict[str, Any], ExitReason]:
        """Let the first process start something, and wait for its end or a limit."""
        number, answer = await self._send(request, descriptors)
        if streams is not None:
            streams.started(lambda: self._kill(number))
        reason = ExitReason.EXIT
        try:
            done, _ = await asyncio.wait({answer}, timeout=wall_s)
            if not done:
                reason = ExitReason.TIME
                self._kill(number)
                done, _ = await asyncio.wait({answer}, timeout=GRACE_S)
            if not done:
                self._lose(FailureCause.HANGING, f"it did not end a command within {GRACE_S:g} s of its limit")
            return answer.result(), ExitReason.OUTPUT if streams is not None and streams.over else reason
        except asyncio.CancelledError:
            self._kill(number)
            raise
        finally:
            self._waiting.pop(number, None)

    async def _send(
        self, request: Mapping[str, Any], descriptors: Sequence[int] = ()
    ) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        number = next(self._requests)
        packet = json.dumps({**request, "number": number}).encode()
        if len(packet) > 1 << 17:
            raise SandboxFailure(
                FailureCause.REQUEST, f"the command line and the environment have {len(packet)} bytes; pass them as files"
            )
        deadline = time.monotonic() + GRACE_S
        while not self._lost:
            try:
                answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
                self._waiting[number] = answer
                socket.send_fds(self._started.channel, [packet], list(descriptors))
                return number, answer
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self._lose(FailureCause.HANGING, f"it took no request for {GRACE_S:g} s")
                await asyncio.sleep(0.01)
            except OSError as error:
                self._lose(FailureCause.LOST, f"it ended: {error}")
        self._waiting.pop(number, None)
        raise SandboxFailure(FailureCause.LOST, f"the sandbox {self.id} is gone: {self._lost}")

    def _kill(self, number: int) -> None:
        with suppress(OSError):
            self._started.channel.send(json.dumps({"do": "kill", "number": number}).encode())

    def _receive(self) -> None:
        try:
            while packet := self._started.channel.recv(1 << 16):
                values = json.loads(packet)
                answer = self._waiting.get(values["number"])
                if answer is not None and not answer.done():
                    answer.set_result(values)
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError):
            pass
        self._lose(FailureCause.LOST, "it ended from outside: is the machine out of memory?", raises=False)

    def _lose(self, cause: FailureCause, why: str, *, raises: bool = True) -> None:
        """Give the sandbox up: every call that waits fails."""
        failure = SandboxFailure(cause, f"the sandbox {self.id} is gone: {why}")
        if not self._lost:
            self._lost = why
            with suppress(OSError, ValueError):
                self._loop.remove_reader(self._started.channel.fileno())
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(failure)
                    answer.exception()  # seen, also where a cancelled call does not wait for it
        if raises:
            raise failure

    async def put_tree(self, path: str, archive: bytes) -> None:
        streams = Streams(archive, 0, None, reads_output=False)
        try:
            answer, reason = await self._run({"do": "put", "path": path}, streams.theirs, 300.0, streams)
        finally:
            streams.close()
        _check_copy(answer, reason, path)

    async def get_tree(self, path: str, limit_mb: int = 64) -> bytes:
        limit = limit_mb << 20
        with tempfile.TemporaryFile() as file:
            await self._collect({"do": "get", "path": path, "limit": limit}, file, path)
            return file.read()

    async def snapshot(self) -> str:
        if not self._started.overlay:
            raise UnsupportedSpec("a snapshot needs overlayfs in user namespaces (Linux 5.11), which this machine lacks")
        with tempfile.TemporaryFile() as file:
            await self._collect({"do": "snapshot"}, file, "snapshot")
            threads = self._provider._threads
            return await self._loop.run_in_executor(threads, self._provider.store.add_snapshot, self._started.image, file)

    async def _collect(self, request: Mapping[str, Any], file: Any, what: str) -> None:
        """Copy what the sandbox writes into a file, in a thread."""
        reading, writing = os.pipe()
        copying = self._loop.run_in_executor(None, collect, reading, file)
        try:
            answer, reason = await self._run(request, (writing,), 300.0)
        finally:
            os.close(writing)
            await asyncio.shield(copying)
        _check_copy(answer, reason, what)
        file.seek(0)

    async def health(self) -> Health:
        try:
            number, answer = await self._send({"do": "ping"})
            async with asyncio.timeout(GRACE_S):
                values = await answer
            self._waiting.pop(number, None)
            return Health(True, values["time"] - time.time())
        except (SandboxFailure, TimeoutError):
            return Health(False)

    async def destroy(self) -> None:
        if self._ending is None:
            self._lose(FailureCause.LOST, "it was destroyed", raises=False)
            for server in self._servers:
                server.close()
            self._ending = self._loop.run_in_executor(None, self._started.end)
        await asyncio.shield(self._ending)
        self._provider.forget(self)


def _check_copy(answer: Mapping[str, Any], reason: ExitReason, what: str) -> None:
    if reason != ExitReason.EXIT or answer.get("status") != 0:
        why = answer.get("refused") or answer.get("full") or f"it was ended by its limits ({reason}, {answer.get('status')})"
        raise SandboxFailure(FailureCause.REQUEST, f"{what!r:.200} cannot be copied: {why}")
