"""A server of the part of Docker's HTTP API that Strop uses, whose containers are sandboxes of this machine."""

from __future__ import annotations

import asyncio
import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from strop.extensions.sandboxes.base import (
    NetworkPolicy,
    Resources,
    Sandbox,
    SandboxCommand,
    SandboxFailure,
    SandboxSpec,
)
from strop.extensions.sandboxes.local.local_provider import LocalProvider


class Answer(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def exit_code(status: int) -> int:
    return 128 - status if status < 0 else status


class FakeDocker:
    """Serves a Unix socket. ``images``: references of local images by the name that Docker has for them."""

    def __init__(self, socket: Path, provider: LocalProvider, images: dict[str, str]) -> None:
        self.socket, self.provider, self.images = socket, provider, images
        self.containers: dict[str, dict[str, Any]] = {}
        self.sandboxes: dict[str, Sandbox] = {}
        self.execs: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.refuses: list[Answer] = []  # of the next requests that start a container

    async def __aenter__(self) -> FakeDocker:
        self.server = await asyncio.start_unix_server(self._serve, self.socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        await self.provider.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                line, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, target, _ = line.split(" ")
                self.requests.append(f"{method} {target}")
                path = urlsplit(target.removeprefix("/v1.41"))
                if path.path.startswith("/exec/") and method == "POST":
                    await self._start(path.path.split("/")[2], reader, writer)
                    break
                status, content = await self._answer(method, path.path, parse_qs(path.query), body)
                writer.write(
                    f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\nContent-Type: application/json\r\n\r\n".encode()
                    + content
                )
        writer.close()

    async def _answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, bytes]:
        try:
            found = await self._handle(
                method, path.strip("/").split("/"), {name: values[0] for name, values in query.items()}, body
            )
            return 200, found if isinstance(found, bytes) else json.dumps(found).encode()
        except Answer as answer:
            return answer.status, json.dumps({"message": str(answer)}).encode()
        except SandboxFailure as failure:
            return 404, json.dumps({"message": str(failure)}).encode()

    async def _handle(self, method: str, words: list[str], query: dict[str, str], body: bytes) -> Any:
        match method, words:
            case "GET", ["images", *name, "json"]:
                if unquote("/".join(name)) not in self.images:
                    raise Answer(404, "No such image")
                return {}
            case "POST", ["images", "create"]:
                return json.dumps({"error": f"manifest unknown: {query['fromImage']}"}).encode() + b"\n"
            case "POST", ["containers", "create"]:
                self.containers[query["name"]] = json.loads(body)
                return {"Id": query["name"]}
            case "GET", ["containers", "json"]:
                return [{"Id": name, "Labels": values["Labels"]} for name, values in self.containers.items()]
            case "POST", ["commit"]:
                image = await self.sandboxes[query["container"]].snapshot()
                self.images[f"sha256:{image}"] = image
                return {"Id": f"sha256:{image}"}
            case "DELETE", ["images", name]:
                del self.images[unquote(name)]
                return []
            case "GET", ["exec", name, "json"]:
                return {"ExitCode": self.execs[name].get("code")}
            case _, ["containers", name, *rest] if name in self.containers:
                return await self._handle_container(method, name, rest, query, body)
        raise Answer(404, "No such container")

    async def _handle_container(self, method: str, name: str, rest: list[str], query: dict[str, str], body: bytes) -> Any:
        values = self.containers[name]
        match method, rest:
            case "POST", ["start"]:
                if self.refuses:
                    raise self.refuses.pop()
                host = values["HostConfig"]
                resources = Resources(memory_mb=host["Memory"] >> 20, processes=host["PidsLimit"], disk_mb=200)
                environment = dict(each.split("=", 1) for each in values["Env"])
                network = NetworkPolicy(egress="none" if host["NetworkMode"] == "none" else "all")
                image = self.images[values["Image"]]
                spec = SandboxSpec(image=image, resources=resources, environment=environment, network=network)
                self.sandboxes[name] = await self.provider.create(spec)
                return None
            case "POST", ["exec"]:
                number = f"exec{len(self.execs)}"
                self.execs[number] = {**json.loads(body), "container": name}
                return {"Id": number}
            case "PUT", ["archive"]:
                await self.sandboxes[name].put_tree(query["path"], body)
                return None
            case "GET", ["archive"]:
                return await self.sandboxes[name].get_tree(query["path"])
            case "GET", ["json"]:
                return {"State": {"OOMKilled": False}}
            case "DELETE", []:
                del self.containers[name]
                if name in self.sandboxes:
                    await self.sandboxes.pop(name).destroy()
                return None
        raise Answer(400, "what is that?")

    async def _start(self, number: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found = self.execs[number]
        writer.write(b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")

        def send(stream: str, part: bytes) -> None:
            for at in range(0, len(part), 10_000):
                piece = part[at : at + 10_000]
                writer.write(struct.pack(">BxxxI", 1 if stream == "stdout" else 2, len(piece)) + piece)

        with suppress(SandboxFailure):
            stdin = await reader.read(-1)
            command = SandboxCommand(
                argv=tuple(found["Cmd"]), stdin=stdin, user=found.get("User", ""), wall_s=200, output_kb=1 << 20
            )
            result = await self.sandboxes[found["container"]].exec(command, send)
            found["code"] = exit_code(result.exit_code)
        with suppress(OSError):
            await writer.drain()
