"""Sandboxes of Modal, whose interface is gRPC spoken by its own client package: ``pip install modal``.

Written against modal 1.6.4; never run against the service.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from strop.extensions.sandboxes.base import Capabilities, FailureCause, SandboxFailure, SandboxSpec, UnsupportedSpec, check_spec
from strop.extensions.sandboxes.supervised import IN_SESSION, NO_EXIT, STAY, OnPart, RemoteProvider, SupervisedSandbox, has_ended

HOST, OWNER = "strop-host", "strop-owner"  # tags
SNAPSHOT = "snapshot:"  # before the number of an image that is one
STDIN_PART = 1 << 20  # bytes; the client refuses to hold more than 2 MiB
_CAUSES = {  # of the client's exceptions, by name; others: refused
    "NotFoundError": FailureCause.LOST,
    "SandboxTerminatedError": FailureCause.LOST,
    "SandboxTimeoutError": FailureCause.LOST,
    "ConflictError": FailureCause.LOST,  # it has ended
    "ClientClosed": FailureCause.LOST,
    "ResourceExhaustedError": FailureCause.THROTTLED,
    "ImageBuildError": FailureCause.IMAGE,
    "RemoteError": FailureCause.IMAGE,
    "TimeoutError": FailureCause.HANGING,
}


@dataclass(frozen=True, kw_only=True)
class ModalOptions:
    """Options of ``sandboxes.provider: modal``. The login is that of ``modal setup``, or of MODAL_TOKEN_ID and MODAL_TOKEN_SECRET."""

    app: str = "strop"  # to which the sandboxes belong; made where it is missing
    registry_secret: str = ""  # the name of Modal's secret with the login of a private registry
    max_hours: float = 24.0  # after which the service ends a sandbox, whatever became of its run


class ModalProvider(RemoteProvider):
    """Makes sandboxes of images that the service pulls (with image builder 2025.06 or later, also of those without Python)."""

    name = "modal"
    options_type = ModalOptions
    capabilities = Capabilities(
        egress=frozenset({"none", "allow", "all"}),
        snapshot=True,
        users=False,
        tests="against a stand-in for its client, never the service",
    )

    def __init__(self, options: ModalOptions = ModalOptions()) -> None:
        super().__init__()
        try:
            import modal
        except ImportError as error:
            raise UnsupportedSpec("sandboxes.provider=modal needs the package modal: pip install modal") from error
        self.options, self.modal, self.app = options, modal, None

    async def create(self, spec: SandboxSpec) -> ModalSandbox:
        check_spec(spec, self.name, self.capabilities)
        resources, network = spec.resources, spec.network
        with failures("making a sandbox", missing=FailureCause.IMAGE):
            made = await self.modal.Sandbox.create.aio(
                "/bin/sh",
                "-c",
                STAY,
                app=await self._find_app(),
                image=self._find_image(spec.image),
                env=dict(spec.environment),
                tags={HOST: socket.gethostname(), OWNER: self.owner},
                timeout=int(self.options.max_hours * 3600),
                cpu=(resources.cpus, resources.cpus),
                memory=(resources.memory_mb, resources.memory_mb),
                block_network=network.egress == "none",
                outbound_domain_allowlist=list(network.hosts) or None,
            )
        sandbox = ModalSandbox(made, self)
        self.add(sandbox)
        return sandbox

    async def _find_app(self) -> Any:
        if self.app is None:
            self.app = await self.modal.App.lookup.aio(self.options.app, create_if_missing=True)
        return self.app

    def _find_image(self, name: str) -> Any:
        if name.startswith(SNAPSHOT):
            return self.modal.Image.from_id(name.removeprefix(SNAPSHOT))
        secret = self.modal.Secret.from_name(self.options.registry_secret) if self.options.registry_secret else None
        return self.modal.Image.from_registry(name, secret=secret)

    async def remove_left_over(self) -> int:
        """Remove sandboxes of runs of this machine that have ended. Those of other machines end after ``max_hours``."""
        removed = 0
        with failures("listing sandboxes"):
            app = await self._find_app()
            async for each in self.modal.Sandbox.list.aio(app_id=app.app_id, tags={HOST: socket.gethostname()}):
                if has_ended((await each.get_tags.aio()).get(OWNER, "")):
                    await each.terminate.aio()
                    removed += 1
        return removed


class ModalSandbox(SupervisedSandbox):
    """A sandbox of Modal."""

    def __init__(self, made: Any, provider: ModalProvider) -> None:
        super().__init__(made.object_id)
        self.made, self.provider = made, provider

    async def attach(self, argv: Sequence[str], stdin: bytes, user: str, on_part: OnPart) -> int:
        if user:
            raise SandboxFailure(FailureCause.REQUEST, "Modal runs commands as the user of the image; leave user empty")
        with failures("a command"):
            process = await self.made.exec.aio("/bin/sh", "-c", IN_SESSION, "sh", *argv, text=False)
            feeding = asyncio.ensure_future(_feed(process.stdin, stdin))
            streams: tuple[tuple[Literal["stdout", "stderr"], AsyncIterator[bytes]], ...] = (
                ("stdout", process.stdout), ("stderr", process.stderr),
            )  # fmt: skip
            reading = [asyncio.ensure_future(_read(stream, parts, on_part)) for stream, parts in streams]
            try:
                code = await process.wait.aio()
                await asyncio.wait(reading, timeout=1.0)  # what the command left running may hold its streams open
                for each in reading:
                    if each.done():
                        each.result()
            finally:
                for task in (feeding, *reading):
                    task.cancel()
        if code < 0:
            raise self.gone(NO_EXIT)
        return int(code)

    async def snapshot(self) -> str:
        with failures("a snapshot"):
            return SNAPSHOT + str((await self.made.snapshot_filesystem.aio(timeout=300)).object_id)

    async def remove(self) -> None:
        self.provider.forget(self)
        with failures("the end of a sandbox"), suppress(self.provider.modal.exception.NotFoundError):
            await self.made.terminate.aio()


async def _feed(stream: Any, stdin: bytes) -> None:
    with suppress(Exception):  # the command reads no more
        for at in range(0, len(stdin), STDIN_PART):
            stream.write(stdin[at : at + STDIN_PART])
            await stream.drain.aio()
        stream.write_eof()
        await stream.drain.aio()


async def _read(stream: Literal["stdout", "stderr"], parts: AsyncIterator[bytes], on_part: OnPart) -> None:
    async for part in parts:
        on_part(stream, part)


@contextmanager
def failures(what: str, missing: FailureCause = FailureCause.LOST) -> Iterator[None]:
    """Turn what the client raises into failures with causes. Raises SandboxFailure, and UnsupportedSpec without a login."""
    import modal

    try:
        yield
    except modal.exception.AuthError as error:
        raise UnsupportedSpec(f"Modal refused the login: {error}; run `modal setup`") from error
    except modal.exception.Error as error:
        names = [each.__name__ for each in type(error).__mro__]
        cause = next((_CAUSES[name] for name in names if name in _CAUSES), FailureCause.REFUSED)
        cause = missing if names[0] == "NotFoundError" else cause
        raise SandboxFailure(cause, f"Modal failed at {what}: {error or names[0]}"[:500]) from error
    except OSError as error:
        raise SandboxFailure(FailureCause.REFUSED, f"Modal does not answer: {error}") from error
