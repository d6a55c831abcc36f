"""The interface of the sandbox for programs: a program in, what it did out. Nothing that a program does is an exception here."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from strop.extensions.sandboxes.base import ExitReason as ExitReason
from strop.extensions.sandboxes.base import SandboxError as SandboxError
from strop.extensions.sandboxes.base import SandboxFull as SandboxFull


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use."""

    cpu_s: float = 5.0  # seconds of processor time, of all its processes
    wall_s: float = 10.0
    memory_mb: int = 256  # MiB, of all its processes
    processes: int = 32
    open_files: int = 64
    file_mb: int = 16  # MiB, the largest file it may write
    disk_mb: int = 32  # MiB of all its files, which are in memory
    output_kb: int = 64  # KiB of each of stdout and stderr; the rest is cut off, and the program ended


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program of one file."""

    source: str
    language: str = "python"
    stdin: str = ""
    files: Mapping[str, str] = field(default_factory=dict)  # relative path -> text, in its working folder
    limits: Limits = Limits()


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a program did. Text that is not UTF-8 has replacement characters."""

    reason: ExitReason
    exit_code: int
    stdout: str = ""
    stderr: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def succeeded(self) -> bool:
        return self.reason == ExitReason.EXIT and self.exit_code == 0


class SandboxSession(Protocol):
    """An interpreter that keeps its variables and files from one call to the next."""

    async def run(self, source: str, *, wall_s: float | None = None) -> RunResult:
        """Run some statements. After a limit or a crash, the next call begins with an empty interpreter."""
        ...


class ProgramRunner(Protocol):
    """Runs programs, many at a time. Safe to call from any event loop."""

    async def run(self, program: Program) -> RunResult:
        """Run a program in a fresh folder. Raises SandboxError if the sandbox fails, ValueError for an unknown language."""
        ...

    def session(self, language: str = "python", limits: Limits = Limits()) -> AbstractAsyncContextManager[SandboxSession]:
        """Open a stateful interpreter. Its limits are those of the whole session, but for time, which is of each call."""
        ...

    async def close(self) -> None: ...
