"""A server of the part of Kubernetes' API that Strop uses, whose pods are sandboxes of this machine."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from aiohttp import web

from strop.extensions.sandboxes.base import Resources, Sandbox, SandboxCommand, SandboxFailure, SandboxSpec
from strop.extensions.sandboxes.local.local_provider import LocalProvider
from support.fake_docker import exit_code
from support.fake_service import FakeService

PODS = "/api/v1/namespaces/tests/pods"


class FakeKubernetes(FakeService):
    """``images``: references of local images by the name that the cluster has for them."""

    def __init__(self, provider: LocalProvider, images: dict[str, str]) -> None:
        super().__init__()
        self.provider, self.images = provider, images
        self.pods: dict[str, dict[str, Any]] = {}
        self.sandboxes: dict[str, Sandbox] = {}
        self.policies: list[dict[str, Any]] = []
        self.states: list[dict[str, Any]] = []  # of the next pods, instead of starting
        self.tokens: set[str] = set()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/apis/networking.k8s.io/v1/namespaces/tests/networkpolicies", self.add_policy),
            web.post(PODS, self.create), web.get(PODS, self.list), web.get(PODS + "/{name}", self.get),
            web.delete(PODS + "/{name}", self.delete), web.get(PODS + "/{name}/exec", self.exec),
        ]  # fmt: skip

    async def close(self) -> None:
        await self.provider.close()

    async def add_policy(self, request: web.Request) -> web.Response:
        body = await request.json()
        known = any(each["metadata"]["name"] == body["metadata"]["name"] for each in self.policies)
        self.policies += [] if known else [body]
        return web.json_response({}, status=409 if known else 201)

    async def create(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers.get("Authorization", ""))
        pod = await request.json()
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        self.pods[name] = pod
        if self.states:
            pod["status"] = self.states.pop(0)
        elif container["image"] not in self.images:
            waiting = {"reason": "ErrImagePull", "message": "not found"}
            pod["status"] = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}
        else:
            pod["status"] = {"phase": "Pending"}
            limits = container["resources"]["limits"]
            resources = Resources(memory_mb=int(limits["memory"][:-2]), disk_mb=200)
            environment = {each["name"]: each["value"] for each in container["env"]}
            spec = SandboxSpec(image=self.images[container["image"]], resources=resources, environment=environment)
            self.sandboxes[name] = await self.provider.create(spec)
            pod["status"] = {"phase": "Running"}
        return web.json_response(pod, status=201)

    async def list(self, request: web.Request) -> web.Response:
        return web.json_response({"items": list(self.pods.values())})

    async def get(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        return web.json_response(pod or {"message": "not found"}, status=200 if pod else 404)

    async def delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        found = self.pods.pop(name, None)
        if name in self.sandboxes:
            await self.sandboxes.pop(name).destroy()
        return web.json_response({}, status=200 if found else 404)

    async def exec(self, request: web.Request) -> web.StreamResponse:
        sandbox = self.sandboxes.get(request.match_info["name"])
        if sandbox is None:
            return web.json_response({"message": "not found"}, status=404)
        channel = web.WebSocketResponse(protocols=["v5.channel.k8s.io"], max_msg_size=0)
        await channel.prepare(request)
        stdin = b""
        async for message in channel:
            if message.data == bytes([255, 0]):
                break
            stdin += message.data[1:]
        parts: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def send() -> None:
            while (part := await parts.get()) is not None:
                await channel.send_bytes(part)

        sending = asyncio.ensure_future(send())
        command = SandboxCommand(argv=tuple(request.query.getall("command")), stdin=stdin, wall_s=200, output_kb=1 << 20)
        with suppress(SandboxFailure, ConnectionError):
            result = await sandbox.exec(
                command, lambda stream, part: parts.put_nowait(bytes([1 if stream == "stdout" else 2]) + part)
            )
            code = exit_code(result.exit_code, result.reason)
            causes = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
            status = {"status": "Failure", "reason": "NonZeroExitCode", "details": causes} if code else {"status": "Success"}
            parts.put_nowait(b"\x03" + json.dumps(status).encode())
        parts.put_nowait(None)
        await sending
        await channel.close()
        return channel
