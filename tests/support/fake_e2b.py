"""A server of the part of E2B's API that Strop uses, and of its daemons, whose sandboxes are sandboxes of this machine."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from contextlib import suppress
from typing import Any

from aiohttp import web

from strop.extensions.sandboxes.base import Sandbox, SandboxCommand, SandboxFailure
from strop.extensions.sandboxes.local.local_provider import LocalProvider
from support.fake_docker import exit_code
from support.fake_service import FakeService, LocalSandboxes


class FakeE2B(LocalSandboxes, FakeService):
    """The names of its images are those of templates."""

    def __init__(self, provider: LocalProvider, images: dict[str, str]) -> None:
        super().__init__(provider, images)
        self.inputs: dict[int, asyncio.Queue[bytes | None]] = {}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v2/sandboxes", self.create), web.get("/v2/sandboxes", self.list),
            web.delete("/sandboxes/{name}", self.delete), web.post("/sandboxes/{name}/snapshots", self.snapshot),
            web.delete("/templates/{name}", self.remove_template),
            web.post("/process.Process/Start", self.start), web.post("/process.Process/SendInput", self.send_input),
            web.post("/process.Process/CloseStdin", self.close_stdin),
        ]  # fmt: skip

    async def create(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["templateID"] not in self.images:
            return web.json_response({"code": 404, "message": f"template '{body['templateID']}' not found"}, status=404)
        name = f"i{next(self.numbers)}"
        await self.make(name, body["templateID"], body.get("envVars") or {})
        self.made[name] = body
        made = {"sandboxID": name, "templateID": body["templateID"], "clientID": "c", "envdVersion": "0.6.0",
                "envdAccessToken": "t0k", "domain": None}  # fmt: skip
        return web.json_response(made, status=201)

    async def list(self, request: web.Request) -> web.Response:
        """One sandbox a page."""
        names = sorted(self.made)
        at = int(request.query.get("nextToken", 0))
        headers = {"X-Next-Token": str(at + 1)} if at + 1 < len(names) else {}
        fixed = {"clientID": "c", "startedAt": "2026-11-29T00:00:00Z", "endAt": "2026-11-29T01:00:00Z", "cpuCount": 2, "memoryMB": 512,
                 "diskSizeMB": 1024, "state": "running", "envdVersion": "0.6.0"}  # fmt: skip
        page = [{**fixed, "sandboxID": name, **self.made[name]} for name in names[at : at + 1]]
        return web.json_response(page, headers=headers)

    async def delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        found = self.made.pop(name, None)
        await self.stop(name)
        return web.Response(status=204) if found else web.json_response({"message": "not found"}, status=404)

    async def snapshot(self, request: web.Request) -> web.Response:
        image = await self.sandboxes[request.match_info["name"]].snapshot()
        self.images[f"snapshot{len(self.images)}:default"] = image
        return web.json_response({"snapshotID": list(self.images)[-1], "names": []}, status=201)

    async def remove_template(self, request: web.Request) -> web.Response:
        return web.Response(status=204 if self.images.pop(request.match_info["name"], None) else 404)

    async def start(self, request: web.Request) -> web.StreamResponse:
        sandbox = self.sandboxes.get(request.headers["E2b-Sandbox-Id"])
        if sandbox is None:
            return web.json_response({"code": 502, "message": "The sandbox was not found"}, status=502)
        assert request.headers["X-Access-Token"] == "t0k" and "X-API-KEY" not in request.headers
        body = await request.read()
        assert struct.unpack(">BI", body[:5]) == (0, len(body) - 5)
        values = json.loads(body[5:])
        answer = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await answer.prepare(request)
        parts: asyncio.Queue[bytes | None] = asyncio.Queue()

        def send(message: dict[str, Any], flags: int = 0) -> None:
            data = json.dumps(message).encode()
            parts.put_nowait(struct.pack(">BI", flags, len(data)) + data)

        process = len(self.inputs) + 1
        given = self.inputs[process] = asyncio.Queue()
        send({"event": {"start": {"pid": process}}})
        running = asyncio.ensure_future(self._run(sandbox, values, given, send))
        running.add_done_callback(lambda _: parts.put_nowait(None))
        while (part := await parts.get()) is not None:
            await answer.write(part)
        return answer

    async def _run(self, sandbox: Sandbox, values: dict[str, Any], given: asyncio.Queue[bytes | None], send: Any) -> None:
        stdin = b""
        while values.get("stdin") and (part := await given.get()) is not None:
            stdin += part
        process = values["process"]
        command = SandboxCommand(argv=(process["cmd"], *process["args"]), stdin=stdin, wall_s=200, output_kb=1 << 20,
                                 environment=process.get("envs") or {}, cwd=process.get("cwd", ""))  # fmt: skip
        with suppress(SandboxFailure, ConnectionError):
            result = await sandbox.exec(
                command, lambda stream, part: send({"event": {"data": {stream: base64.b64encode(part).decode()}}})
            )
            code = exit_code(result.exit_code)
            end = {"exited": True, "status": f"exit status {code}", **({"exitCode": code} if code else {})}
            send({"event": {"keepalive": {}}})
            send({"event": {"end": end}})
            send({}, 2)

    async def send_input(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.inputs[body["process"]["pid"]].put_nowait(base64.b64decode(body["input"]["stdin"]))
        return web.json_response({})

    async def close_stdin(self, request: web.Request) -> web.Response:
        self.inputs[(await request.json())["process"]["pid"]].put_nowait(None)
        return web.json_response({})
