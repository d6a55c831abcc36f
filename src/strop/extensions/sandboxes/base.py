"""The protocol of sandboxes: machines made from an image, in which commands run, and the errors of their providers.

    provider.create(spec) -> sandbox -> exec, put_tree, get_tree, snapshot, health -> destroy

What a command does is a result, never an exception. An exception is a ``SandboxFailure``: it has a ``FailureCause``, which says who can
have caused it (``strop.endings``) and whether it makes sense to try again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from strop.endings import Ending
from strop.tools.base import InfrastructureError


class ExitReason(StrEnum):
    """Why a program ended."""

    EXIT = "exit"  # by itself, with ``exit_code``
    TIME = "time"  # its limit on processor or wall time
    MEMORY = "memory"
    OUTPUT = "output"  # it wrote more than its limit
    SIGNAL = "signal"  # a signal that no limit sent; ``exit_code`` is its negative number
    COMPILE = "compile"  # its compiler refused it; ``stderr`` says why


class SandboxError(InfrastructureError):
    """The sandbox itself failed; no fault of a program. The message says what to do."""

    ending = Ending.SANDBOX


class SandboxFull(SandboxError):
    """As many interpreters are open as may be; one that closes makes room."""


class FailureCause(StrEnum):
    """What failed: the name in messages and tables, the ending of the rollout, and whether another sandbox may work."""

    ending: Ending
    retried: bool
    meaning: str

    def __new__(cls, name: str, ending: Ending, retried: bool, meaning: str) -> FailureCause:
        member = str.__new__(cls, name)
        member._value_, member.ending, member.retried, member.meaning = name, ending, retried, meaning
        return member

    REFUSED = "refused", Ending.SANDBOX, True, "the provider refused to make a sandbox: it is full, or a quota is used up"
    THROTTLED = "throttled", Ending.PROVIDER_LIMIT, True, "the provider limits the rate of requests"
    SLOW = "slow", Ending.SANDBOX, True, "a sandbox was not ready in time, for example because its image was still being pulled"
    LOST = "lost", Ending.SANDBOX, False, "a sandbox vanished while it was in use, and its files with it"
    HANGING = "hanging", Ending.SANDBOX, False, "a sandbox or its provider did not answer in time"
    CLOCK = "clock", Ending.SANDBOX, True, "the clock of a sandbox is wrong"
    DISK = "disk", Ending.SANDBOX, True, "the provider, not the program, ran out of disk space"
    REGISTRY = "registry", Ending.SERVICE, True, "a registry of images could not be reached, or sent damaged data"
    IMAGE = "image", Ending.BROKEN_TASK, False, "the image does not exist, is damaged, or is larger than allowed"
    # The policy can cause it, by removing what is looked for. Before it acts, it is the task's fault (task_sandbox.prepare).
    REQUEST = "request", Ending.CRASH, False, "a path, a user or a program does not exist in the sandbox, or a file is too large"


class SandboxFailure(SandboxError):
    """A provider or an image failed. ``cause`` says how."""

    def __init__(self, cause: FailureCause, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message, cause.ending)
        self.cause, self.retry_after_s = cause, retry_after_s


class UnsupportedSpec(SandboxError):
    """A provider cannot do what a configuration asks. Raised before a sandbox is made; the message says what to set instead."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one sandbox may use, all its commands together."""

    cpus: float = 1.0
    memory_mb: int = 2048
    disk_mb: int = 1024  # written beyond the image
    processes: int = 256


@dataclass(frozen=True, kw_only=True)
class NetworkPolicy:
    """Where a sandbox may connect to. Nothing connects to it."""

    egress: Literal["none", "allow", "all"] = "none"
    hosts: tuple[str, ...] = ()  # with egress=allow: HOST, HOST:PORT or *.DOMAIN
    forward: tuple[int, ...] = ()  # ports of this machine's loopback that the sandbox reaches as 127.0.0.1:PORT

    def __post_init__(self) -> None:
        if (self.egress == "allow") != bool(self.hosts):
            raise ValueError(
                f"hosts are for egress=allow, which needs them; found egress={self.egress} and hosts={list(self.hosts)}"
            )


@dataclass(frozen=True, kw_only=True)
class SandboxSpec:
    """What a sandbox is made from."""

    image: str
    resources: Resources = Resources()
    network: NetworkPolicy = NetworkPolicy()
    environment: Mapping[str, str] = field(default_factory=dict)  # in addition to the image's


@dataclass(frozen=True, kw_only=True)
class SandboxCommand:
    """One command in a sandbox."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    environment: Mapping[str, str] = field(default_factory=dict)  # in addition to the sandbox's
    cwd: str = ""  # "": that of the image
    user: str = ""  # a name or a number; "": that of the image
    wall_s: float = 60.0
    output_kb: int = 1024  # KiB of stdout and stderr together; a command that writes more is ended


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """What a command did."""

    reason: ExitReason
    exit_code: int  # negative: the signal that ended it
    stdout: bytes = b""
    stderr: bytes = b""
    wall_s: float = 0.0  # by this machine's clock

    @property
    def succeeded(self) -> bool:
        return self.reason == ExitReason.EXIT and self.exit_code == 0

    @property
    def text(self) -> str:
        """Both streams as text, with replacement characters."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")


@dataclass(frozen=True)
class Health:
    """Whether a sandbox answers, and how wrong its clock is."""

    answers: bool
    clock_skew_s: float | None = None  # None: not known


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a provider can do beyond commands and files."""

    egress: frozenset[str] = frozenset({"none"})
    forward: bool = False
    snapshot: bool = False  # of the files; processes are not kept
    users: bool = True  # commands as another user than that of the image
    limits_disk: bool = False
    limits_processes: bool = False
    tests: str = ""  # where it was tried, if not against the real service


OnOutput = Callable[[Literal["stdout", "stderr"], bytes], None]


class Sandbox(Protocol):
    """A machine of an image. Several commands may run in it at a time; all of them end with it."""

    @property
    def id(self) -> str: ...

    async def exec(self, command: SandboxCommand, on_output: OnOutput | None = None) -> CommandResult:
        """Run a command. ``on_output`` gets its output while it runs. Raises SandboxFailure."""
        ...

    async def put_tree(self, path: str, archive: bytes) -> None:
        """Unpack a tar archive at a folder, which is made where it is missing. Raises SandboxFailure."""
        ...

    async def get_tree(self, path: str, limit_mb: int = 64) -> bytes:
        """Return a file or a folder as a tar archive with names relative to its parent.

        Raises SandboxFailure, with the cause ``request`` if there is none or if it is larger.
        """
        ...

    async def snapshot(self) -> str:
        """Keep the files as an image, and return its name for ``create``, also of several sandboxes (a fork)."""
        ...

    async def health(self) -> Health: ...

    async def destroy(self) -> None:
        """End everything in it. May be called twice."""
        ...


class SandboxProvider(Protocol):
    """Makes sandboxes. Belongs to one event loop."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox. Raises SandboxFailure, and UnsupportedSpec for what ``capabilities`` lacks."""
        ...

    async def remove_snapshot(self, image: str) -> None:
        """Remove what ``snapshot`` returned. Sandboxes of it go on. Raises SandboxFailure."""
        ...

    async def remove_left_over(self) -> int:
        """Remove what runs have left that ended without closing the provider. Return how many sandboxes."""
        ...

    async def close(self) -> None:
        """Destroy every open sandbox."""
        ...


def check_spec(spec: SandboxSpec, provider: str, can: Capabilities) -> None:
    """Raise UnsupportedSpec for a spec that a provider cannot keep."""
    if spec.network.egress not in can.egress:
        known = ", ".join(sorted(can.egress))
        raise UnsupportedSpec(f"the provider {provider} has no network egress={spec.network.egress}; set one of {known}")
    if spec.network.forward and not can.forward:
        raise UnsupportedSpec(f"the provider {provider} cannot forward ports of this machine; leave forward empty")
