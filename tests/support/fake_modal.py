"""A stand-in for the part of the package modal that Strop calls, whose sandboxes are sandboxes of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from strop.extensions.sandboxes.base import Sandbox, SandboxCommand, SandboxFailure
from strop.extensions.sandboxes.local.local_provider import LocalProvider
from support.fake_docker import exit_code
from support.fake_service import LocalSandboxes


class Error(Exception):
    pass


EXCEPTIONS = {name: type(name, (Error,), {}) for name in (
    "AuthError", "NotFoundError", "ResourceExhaustedError", "SandboxTerminatedError", "RemoteError", "ConnectionError",
)}  # fmt: skip


def aio(function: Callable[..., Any]) -> SimpleNamespace:
    """The package's functions block, and have ``aio`` for callers that await them."""
    return SimpleNamespace(aio=function)


class FakeModal(LocalSandboxes):
    """Put it into ``sys.modules``."""

    exception = SimpleNamespace(Error=Error, **EXCEPTIONS)

    def __init__(self, provider: LocalProvider, images: dict[str, str]) -> None:
        super().__init__(provider, images)
        self.refuses: list[Exception] = []
        self.App = SimpleNamespace(lookup=aio(self._lookup))
        self.Image = SimpleNamespace(from_registry=lambda tag, secret=None: tag, from_id=lambda number: number)
        self.Sandbox = SimpleNamespace(create=aio(self._create), list=aio(self._list))

    async def _lookup(self, name: str, *, create_if_missing: bool) -> SimpleNamespace:
        return SimpleNamespace(app_id=f"ap-{name}")

    async def _create(self, *args: str, image: str, env: dict[str, str], **options: Any) -> SimpleNamespace:
        if self.refuses:
            raise self.refuses.pop(0)
        if image not in self.images:
            raise EXCEPTIONS["RemoteError"](f"image build for {image} failed")
        name = f"sb-{next(self.numbers)}"
        await self.make(name, image, env)
        self.made[name] = options
        return self._describe(name)

    def _describe(self, name: str) -> SimpleNamespace:
        async def terminate() -> None:
            self.made.pop(name, None)
            await self.stop(name)

        async def snapshot(timeout: int) -> SimpleNamespace:
            self.images[f"im-{name}"] = await self.sandboxes[name].snapshot()
            return SimpleNamespace(object_id=f"im-{name}")

        async def get_tags() -> dict[str, str]:
            return dict(self.made[name]["tags"])

        async def execute(*argv: str, text: bool) -> FakeProcess:
            if name not in self.sandboxes:
                raise EXCEPTIONS["NotFoundError"](f"there is no {name}")
            return FakeProcess(self.sandboxes[name], argv)

        return SimpleNamespace(
            object_id=name, exec=aio(execute), terminate=aio(terminate), snapshot_filesystem=aio(snapshot), get_tags=aio(get_tags)
        )

    async def _list(self, *, app_id: str, tags: dict[str, str]) -> AsyncIterator[SimpleNamespace]:
        for name, options in list(self.made.items()):
            if tags.items() <= options["tags"].items():
                yield self._describe(name)


class FakeProcess:
    def __init__(self, sandbox: Sandbox, argv: tuple[str, ...]) -> None:
        self.sandbox, self.argv = sandbox, argv
        self.given = b""
        self.parts: dict[str, asyncio.Queue[bytes | None]] = {"stdout": asyncio.Queue(), "stderr": asyncio.Queue()}
        self.running: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.stdin = SimpleNamespace(write=self._write, write_eof=self._start, drain=aio(self._drain))
        self.stdout, self.stderr = self._read("stdout"), self._read("stderr")
        self.wait: Any = aio(self._wait)

    def _write(self, data: bytes) -> None:
        assert len(data) <= 2 << 20
        self.given += data

    def _start(self) -> None:
        self.task = asyncio.ensure_future(self._run())

    async def _drain(self) -> None:
        pass

    async def _run(self) -> None:
        command = SandboxCommand(argv=self.argv, stdin=self.given, wall_s=200, output_kb=1 << 20)
        try:
            result = await self.sandbox.exec(command, lambda stream, part: self.parts[stream].put_nowait(part))
            self.running.set_result(exit_code(result.exit_code))
        except SandboxFailure as failure:
            self.running.set_exception(EXCEPTIONS["SandboxTerminatedError"](str(failure)))
        for queue in self.parts.values():
            queue.put_nowait(None)

    def _wait(self) -> Awaitable[int]:
        return asyncio.shield(self.running)

    async def _read(self, stream: str) -> AsyncIterator[bytes]:
        while (part := await self.parts[stream].get()) is not None:
            yield part
