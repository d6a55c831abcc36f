"""A server of the part of Daytona's API that Strop uses, and of its daemons, whose sandboxes are sandboxes of this machine."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from aiohttp import web

from strop.extensions.sandboxes.base import Sandbox, SandboxCommand, SandboxFailure
from strop.extensions.sandboxes.local.local_provider import LocalProvider
from strop.extensions.sandboxes.trees import read_file, write_files
from support.fake_service import FakeService, LocalSandboxes

PREFIXES = {"stdout": b"\x01\x01\x01", "stderr": b"\x02\x02\x02"}


class FakeDaytona(LocalSandboxes, FakeService):
    def __init__(self, provider: LocalProvider, images: dict[str, str]) -> None:
        super().__init__(provider, images)
        self.states: list[dict[str, Any]] = []  # of the next sandboxes, after which they stay as they are
        self.logs: dict[str, asyncio.Queue[bytes | None]] = {}
        self.running: set[asyncio.Task[None]] = set()

    def routes(self) -> list[web.RouteDef]:
        box = "/toolbox/{name}"
        return [
            web.post("/api/sandbox", self.create), web.get("/api/sandbox", self.list), web.get("/api/sandbox/{name}", self.get),
            web.delete("/api/sandbox/{name}", self.delete), web.post("/api/sandbox/{name}/snapshot", self.snapshot),
            web.get("/api/snapshots/{name}", self.find_snapshot), web.delete("/api/snapshots/{name}", self.remove_snapshot),
            web.post(box + "/process/session", self.add_session), web.post(box + "/process/session/{session}/exec", self.exec),
            web.get(box + "/process/session/{session}/command/{command}/logs", self.follow),
            web.delete(box + "/process/session/{session}", self.end_session),
            web.post(box + "/files/bulk-upload", self.upload), web.get(box + "/files/download", self.download),
            web.delete(box + "/files", self.remove_file),
        ]  # fmt: skip

    async def close(self) -> None:
        await super().close()
        await asyncio.gather(*self.running, return_exceptions=True)

    def describe(self, name: str) -> dict[str, Any]:
        fixed = {"organizationId": "o", "user": "root", "public": False, "kvm": False, "target": "us", "cpu": 1, "gpu": 0, "memory": 1,
                 "disk": 1, "networkBlockAll": True, "env": {}, "daemonVersion": "0.226.1"}  # fmt: skip
        address = {"id": name, "name": name, "state": "started", "toolboxProxyUrl": f"{self.url}/toolbox"}
        return {**fixed, **address, **self.made[name]}

    async def create(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer k3y"
        body = await request.json()
        name = f"d{next(self.numbers)}"
        image = body.get("snapshot") or body["buildInfo"]["dockerfileContent"].removeprefix("FROM ").strip()
        self.made[name] = {"labels": body["labels"], "state": "creating"}
        if self.states:
            self.made[name] |= self.states.pop(0)
        elif image not in self.images:
            self.made[name] |= {"state": "build_failed", "errorReason": f"failed to pull {image}: not found"}
        else:
            await self.make(name, image, body["env"])
        answer = web.json_response(self.describe(name))
        if name in self.sandboxes:
            self.made[name].pop("state")
        return answer

    async def list(self, request: web.Request) -> web.Response:
        """One sandbox a page."""
        at = int(request.query.get("cursor", 0))
        items = [self.describe(name) for name in self.made][at : at + 1]
        return web.json_response({"items": items, "nextCursor": str(at + 1) if at + 1 < len(self.made) else None})

    async def get(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.json_response(
            self.describe(name) if name in self.made else {"message": "not found"}, status=200 if name in self.made else 404
        )

    async def delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.made:
            return web.json_response({"message": "not found"}, status=404)
        answer = web.json_response({**self.describe(name), "state": "destroying"})
        del self.made[name]
        await self.stop(name)
        return answer

    async def snapshot(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.images[(await request.json())["name"]] = await self.sandboxes[name].snapshot()
        return web.json_response({**self.describe(name), "state": "snapshotting"})

    async def find_snapshot(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        fixed = {"general": False, "state": "active", "size": 1, "entrypoint": [], "cpu": 1, "gpu": 0, "mem": 1, "disk": 1,
                 "errorReason": None, "createdAt": "2026-11-29", "updatedAt": "2026-11-29", "lastUsedAt": None}  # fmt: skip
        return web.json_response({**fixed, "id": f"id-{name}", "name": name}, status=200 if name in self.images else 404)

    async def remove_snapshot(self, request: web.Request) -> web.Response:
        del self.images[request.match_info["name"].removeprefix("id-")]
        return web.json_response({})

    def find(self, request: web.Request) -> Sandbox:
        assert request.headers["Authorization"] == "Bearer k3y"
        found = self.sandboxes.get(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound(text='{"message": "sandbox not found"}')
        return found

    async def add_session(self, request: web.Request) -> web.Response:
        self.find(request)
        return web.json_response({}, status=201)

    async def end_session(self, request: web.Request) -> web.Response:
        self.find(request)
        return web.Response(status=204)

    async def exec(self, request: web.Request) -> web.Response:
        sandbox, body = self.find(request), await request.json()
        log = self.logs[request.match_info["session"]] = asyncio.Queue()
        running = asyncio.ensure_future(self._run(sandbox, body["command"], log))
        self.running.add(running)
        running.add_done_callback(self.running.discard)
        return web.json_response({"cmdId": request.match_info["session"]}, status=202)

    async def _run(self, sandbox: Sandbox, script: str, log: asyncio.Queue[bytes | None]) -> None:
        """Label each line of output, as the daemon does: NUL bytes are lost, and a last line gets an end."""
        rest = {"stdout": b"", "stderr": b""}

        def label(stream: str, part: bytes) -> None:
            *lines, rest[stream] = (rest[stream] + part.replace(b"\0", b"")).split(b"\n")
            for line in lines:
                log.put_nowait(PREFIXES[stream] + line + b"\n")

        with suppress(SandboxFailure):
            await sandbox.exec(SandboxCommand(argv=("/bin/sh", "-c", script), wall_s=200, output_kb=1 << 20), label)
        for stream, line in rest.items():
            if line:
                log.put_nowait(PREFIXES[stream] + line + b"\n")
        log.put_nowait(None)

    async def follow(self, request: web.Request) -> web.WebSocketResponse:
        self.find(request)
        channel = web.WebSocketResponse()
        await channel.prepare(request)
        log = self.logs[request.match_info["session"]]
        with suppress(ConnectionError):
            while (line := await log.get()) is not None:
                for at in range(0, len(line), 700):
                    await channel.send_bytes(line[at : at + 700])
        await channel.close()
        return channel

    async def upload(self, request: web.Request) -> web.Response:
        sandbox, form = self.find(request), await request.post()
        await write_files(sandbox, {str(form["files[0].path"]): form["files[0].file"].file.read()})  # type: ignore[union-attr]
        return web.json_response({})

    async def download(self, request: web.Request) -> web.Response:
        return web.Response(body=await read_file(self.find(request), request.query["path"]))

    async def remove_file(self, request: web.Request) -> web.Response:
        await self.find(request).exec(SandboxCommand(argv=("rm", "-f", request.query["path"])))
        return web.Response(status=204)
