"""Sandboxes that are reached over a network: commands run under a small shell script, so that limits hold wherever they run.

A subclass says how a command is attached to (``attach``); this class adds the working folder, the environment, limits of time and output,
the end of a cancelled command, and files by ``tar`` in the sandbox.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from strop.extensions.sandboxes.base import (
    CommandResult,
    ExitReason,
    FailureCause,
    Health,
    OnOutput,
    SandboxCommand,
    SandboxFailure,
)

STAY = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"  # what a container runs itself
GRACE_S = 20.0  # after a limit, and for requests of the provider's own
# Arguments: a file for its process number, a folder or "", a mark for errors, how many variables, NAME=VALUE ..., the command.
_SCRIPT = """
file=$1 folder=$2 mark=$3 count=$4; shift 4
while [ "$count" -gt 0 ]; do export "$1"; shift; count=$((count - 1)); done
echo $$ > "$file" 2>/dev/null
if [ -n "$folder" ]; then
  [ -d "$folder" ] || mkdir -p "$folder" 2>/dev/null
  cd "$folder" 2>/dev/null || { echo "$mark there is no folder $folder" >&2; exit 126; }
fi
command -v "$1" >/dev/null 2>&1 || { echo "$mark there is no $1" >&2; exit 126; }
exec "$@"
"""
# Ends a command, what it started, and the processes of its session and group.
_KILL = """
leader=$(cat "$1" 2>/dev/null) || exit 0; rm -f "$1"
for round in 1 2 3; do
  found=" $leader " before=
  while [ "$found" != "$before" ]; do
    before=$found
    for stat in /proc/[0-9]*/stat; do
      read -r line < "$stat" || continue
      pid=${stat#/proc/}; pid=${pid%/stat}; rest=${line##*) }; set -- $rest
      case $found in *" $pid "*) ;; *" $2 "*) found="$found$pid " ;; *) [ "$4" = "$leader" ] && found="$found$pid " ;; esac
    done 2>/dev/null
  done
  kill -9 "-$leader" $found 2>/dev/null
done
exit 0
"""
# Gives a command a session of its own where there is setsid, so that _KILL finds what it started, and turns a signal into 128 + N.
IN_SESSION = 'command -v setsid >/dev/null 2>&1 && set -- setsid "$@"; "$@"; exit $?'
NO_EXIT = "its command ended without an exit code"
OnPart = Callable[[Literal["stdout", "stderr"], bytes], None]


class SupervisedSandbox(ABC):
    """A sandbox whose provider can attach to a command, and little else."""

    def __init__(self, name: str) -> None:
        self.id = name
        self.lost = ""  # why it can no longer be used
        self.environment: Mapping[str, str] = {}  # of its commands, where its provider cannot set it
        self._loose: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def attach(self, argv: Sequence[str], stdin: bytes, user: str, on_part: OnPart) -> int:
        """Run a command to its end. Return its exit code, 128 + N for signal N. Raises SandboxFailure."""

    @abstractmethod
    async def remove(self) -> None:
        """End the sandbox, if it still exists."""

    async def snapshot(self) -> str:
        raise NotImplementedError

    async def was_out_of_memory(self) -> bool:
        """Whether the memory limit has ended a process."""
        return False

    async def exec(self, command: SandboxCommand, on_output: OnOutput | None = None) -> CommandResult:
        self._check()
        mark, began = f"strop-{secrets.token_hex(8)}", time.monotonic()
        kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        over = asyncio.Event()

        def on_part(stream: Literal["stdout", "stderr"], part: bytes) -> None:
            left = (command.output_kb << 10) - sum(map(len, kept.values()))
            if len(part) > left:
                over.set()
            if part := part[: max(0, left)]:
                kept[stream] += part
                if on_output is not None:
                    on_output(stream, part)

        variables = [f"{name}={value}" for name, value in {**self.environment, **command.environment}.items()]
        argv = [
            "/bin/sh",
            "-c",
            _SCRIPT,
            "sh",
            f"/tmp/.{mark}",
            command.cwd,
            mark,
            str(len(variables)),
            *variables,
            *command.argv,
        ]
        running = asyncio.ensure_future(self.attach(argv, command.stdin, command.user, on_part))
        reason, status = await self._wait(running, over, f"/tmp/.{mark}", command.wall_s)
        if reason == ExitReason.EXIT and status == 126 and (refused := kept["stderr"].partition(mark.encode()))[1]:
            raise SandboxFailure(
                FailureCause.REQUEST, f"the command cannot start:{refused[2].decode('utf-8', 'replace').rstrip()}"
            )
        if reason == ExitReason.EXIT and 128 < status < 128 + 65:
            reason = ExitReason.MEMORY if status == 137 and await self.was_out_of_memory() else ExitReason.SIGNAL
            status = 128 - status
        found = {name: bytes(text) for name, text in kept.items()}
        return CommandResult(reason=reason, exit_code=status, wall_s=time.monotonic() - began, **found)

    async def _wait(self, running: asyncio.Future[int], over: asyncio.Event, file: str, wall_s: float) -> tuple[ExitReason, int]:
        full = asyncio.ensure_future(over.wait())
        try:
            both: set[asyncio.Future[Any]] = {running, full}
            await asyncio.wait(both, timeout=wall_s, return_when=asyncio.FIRST_COMPLETED)
            if running.done() and not over.is_set():
                return ExitReason.EXIT, self._result(running)
            reason = ExitReason.OUTPUT if over.is_set() else ExitReason.TIME
            await self._kill(file)
            await asyncio.wait({running}, timeout=GRACE_S)
            if not running.done():
                self.lost = "it did not end a command at its limit"
                raise self.gone(self.lost, FailureCause.HANGING)
            self._result(running)
            return reason, -9
        except asyncio.CancelledError:
            self.later(self._kill(file))
            raise
        finally:
            full.cancel()
            running.cancel()

    def _result(self, running: asyncio.Future[int]) -> int:
        try:
            return running.result()
        except SandboxFailure:
            if self.lost:
                self._check()
            raise
        except (
            OSError,
            EOFError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # a daemon that a policy replaced
            self._check()
            raise self.gone(error or type(error).__name__) from error

    async def _kill(self, file: str) -> None:
        with suppress(SandboxFailure, OSError, TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self.attach(["/bin/sh", "-c", _KILL, "sh", file], b"", "", lambda stream, part: None)

    def later(self, work: Coroutine[Any, Any, object]) -> None:
        """Start work that is not waited for, and whose failure changes nothing."""

        async def run() -> None:
            with suppress(SandboxFailure):
                await work

        task = asyncio.ensure_future(run())
        self._loose.add(task)
        task.add_done_callback(self._loose.discard)

    def _check(self) -> None:
        if self.lost:
            raise self.gone(self.lost)

    def gone(self, why: object, cause: FailureCause = FailureCause.LOST) -> SandboxFailure:
        return SandboxFailure(cause, f"the sandbox {self.id} is gone: {why}")

    async def put_tree(self, path: str, archive: bytes) -> None:
        await self.copy_in(["/bin/sh", "-c", 'mkdir -p "$1" && exec tar -x -f - -C "$1"', "sh", path], archive, path)

    async def copy_in(self, argv: Sequence[str], data: bytes, path: str) -> None:
        result = await self.exec(SandboxCommand(argv=tuple(argv), stdin=data, wall_s=300.0))
        if not result.succeeded:
            raise SandboxFailure(FailureCause.REQUEST, f"{path!r:.200} cannot be written: {result.text.strip()[-300:]}")

    async def get_tree(self, path: str, limit_mb: int = 64) -> bytes:
        return await self.pack(path, limit_mb)

    async def pack(self, path: str, limit_mb: int, file: str = "-") -> bytes:
        """Make a tar archive of a path in a file of the sandbox, or return it. Raises SandboxFailure."""
        script = 'test -e "$1" || { echo "there is no $1" >&2; exit 1; }; exec tar -c -f "$4" -C "$2" "$3"'
        path = posixpath.normpath(path)
        argv = ("/bin/sh", "-c", script, "sh", path, posixpath.dirname(path), posixpath.basename(path) or ".", file)
        result = await self.exec(SandboxCommand(argv=argv, wall_s=300.0, output_kb=(limit_mb << 10) + 64))
        if not result.succeeded or len(result.stdout) > limit_mb << 20:
            why = (
                "it is larger than allowed"
                if result.reason == ExitReason.OUTPUT
                else result.stderr.decode("utf-8", "replace").strip()[-300:]
            )
            raise SandboxFailure(FailureCause.REQUEST, f"{path!r:.200} cannot be copied: {why or result.reason}")
        return result.stdout

    async def health(self) -> Health:
        try:
            began = time.time()
            result = await self.exec(SandboxCommand(argv=("date", "+%s"), wall_s=GRACE_S))
            now = (began + time.time()) / 2
            return Health(result.succeeded, int(result.stdout) - now if result.succeeded else None)
        except SandboxFailure as failure:
            return Health(failure.cause == FailureCause.REQUEST)  # an image without date
        except ValueError:
            return Health(True)

    async def destroy(self) -> None:
        first, self.lost = not self.lost or self.lost != "it was destroyed", "it was destroyed"
        for task in self._loose:
            task.cancel()
        if first:
            await self.remove()


class RemoteProvider:
    """Knows which of its sandboxes are open, and what they are marked with, so that another run can remove them if this one is killed."""

    def __init__(self) -> None:
        self.owner = name_owner()
        self._open: set[SupervisedSandbox] = set()

    async def remove_snapshot(self, image: str) -> None:
        """Leave it to the service, which removes it after some days."""

    def add(self, sandbox: SupervisedSandbox) -> None:
        self._open.add(sandbox)

    def forget(self, sandbox: SupervisedSandbox) -> None:
        self._open.discard(sandbox)

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.destroy() for sandbox in list(self._open)))


def name_owner() -> str:
    """Name this process, for what it makes elsewhere: host, process, and when that began."""
    return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"


def has_ended(owner: str) -> bool:
    """Whether a named process was one of this machine, and is gone. Its number may be another's by now."""
    host, process, began = [*owner.rsplit(":", 2), "", ""][:3]
    return host == socket.gethostname() and process.isdigit() and _started(int(process)) != began


def _started(process: int) -> str:
    """When a process began, in ticks since this machine booted; "" if there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
