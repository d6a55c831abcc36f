"""Sandboxes as containers of Docker or Podman, by the HTTP API (1.41) of their socket.

The socket gives its user the rights of root on that machine: only the run may reach it, never a sandbox.
"""

from __future__ import annotations

import asyncio
import json
import os
import posixpath
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast
from urllib.parse import quote, urlencode

from strop.extensions.sandboxes.base import (
    Capabilities,
    FailureCause,
    SandboxFailure,
    SandboxSpec,
    check_spec,
)
from strop.extensions.sandboxes.http_provider import MAX_JSON, HttpProvider
from strop.extensions.sandboxes.supervised import GRACE_S, NO_EXIT, STAY, OnPart, SupervisedSandbox

LABEL = "strop.sandbox"
_KEPT = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE")
_NO_IMAGE = ("manifest unknown", "not found", "no such image", "does not exist", "invalid reference", "denied")


@dataclass(frozen=True, kw_only=True)
class DockerOptions:
    """Options of ``sandboxes.provider: docker`` and ``podman``."""

    socket: str = ""  # "": that of DOCKER_HOST, or the usual one
    runtime: str = ""  # of containers, for example runsc; "": the daemon's


class DockerProvider(HttpProvider):
    """Makes containers."""

    name = "docker"
    service = "the container daemon"
    texts: ClassVar[Mapping[str, FailureCause]] = {
        "no space left": FailureCause.DISK,
        "toomanyrequests": FailureCause.THROTTLED,
        **dict.fromkeys(_NO_IMAGE, FailureCause.IMAGE),
    }
    options_type = DockerOptions
    capabilities = Capabilities(
        egress=frozenset({"none", "all"}),
        snapshot=True,
        limits_processes=True,
        tests="against a server of the same API, made for the tests",
    )

    def __init__(self, options: DockerOptions = DockerOptions()) -> None:
        super().__init__("http://docker/v1.41")
        self.options = options
        self.socket = options.socket or self._find_socket()

    def make_connector(self) -> Any:
        import aiohttp

        return aiohttp.UnixConnector(self.socket, limit=0)

    def _find_socket(self) -> str:
        named = os.environ.get("DOCKER_HOST", "")
        if named.startswith("unix://"):
            return named.removeprefix("unix://")
        return "/var/run/docker.sock"

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        check_spec(spec, self.name, self.capabilities)
        if (await self.call("GET", f"/images/{quote(spec.image, safe='')}/json", accepted=(404,))) is None:
            await self._pull(spec.image)
        name = f"strop-{secrets.token_hex(8)}"
        await self.call("POST", f"/containers/create?name={name}", self._describe(spec))
        sandbox = DockerSandbox(name, self)
        try:
            await self.call("POST", f"/containers/{name}/start")
        except BaseException:
            await asyncio.shield(sandbox.destroy())
            raise
        self.add(sandbox)
        return sandbox

    def _describe(self, spec: SandboxSpec) -> dict[str, Any]:
        resources, network = spec.resources, spec.network
        host = {
            "Init": True,
            "NetworkMode": "none" if network.egress == "none" else "bridge",
            "Memory": resources.memory_mb << 20,
            "MemorySwap": resources.memory_mb << 20,
            "NanoCpus": int(resources.cpus * 1e9),
            "PidsLimit": resources.processes,
            "CapDrop": ["ALL"],
            "CapAdd": list(_KEPT),
            "SecurityOpt": ["no-new-privileges"],
            **({"Runtime": self.options.runtime} if self.options.runtime else {}),
        }
        return {
            "Image": spec.image,
            "Entrypoint": ["/bin/sh", "-c", STAY],
            "Cmd": [],
            "Env": [f"{name}={value}" for name, value in spec.environment.items()],
            "Labels": {LABEL: self.owner},
            "NetworkDisabled": network.egress == "none",
            "HostConfig": host,
        }

    async def _pull(self, image: str) -> None:
        tag = {} if "@" in image or ":" in image.rpartition("/")[2] else {"tag": "latest"}  # without one, Docker pulls all tags
        path = f"/images/create?{urlencode({'fromImage': image, **tag})}"
        text = await self.call("POST", path, raw=MAX_JSON, within_s=None)
        for line in text.splitlines():
            if (found := json.loads(line)).get("error"):
                raise self.read_failure(500, str(found["error"]))

    async def remove_snapshot(self, image: str) -> None:
        await self.call("DELETE", f"/images/{quote(image, safe='')}", accepted=(404, 409))

    async def remove_left_over(self) -> int:
        """Remove containers of runs of this machine that have ended."""
        found = await self.call(
            "GET", f"/containers/json?{urlencode({'all': 'true', 'filters': json.dumps({'label': [LABEL]})})}"
        )
        return await self.delete_ended({_removal(each["Id"]): each.get("Labels", {}).get(LABEL, "") for each in found})


class PodmanProvider(DockerProvider):
    """Makes containers by Podman's socket, which answers Docker's API."""

    name = "podman"

    def _find_socket(self) -> str:
        own = f"{os.environ.get('XDG_RUNTIME_DIR', f'/run/user/{os.getuid()}')}/podman/podman.sock"
        return own if os.path.exists(own) else "/run/podman/podman.sock"


class DockerSandbox(SupervisedSandbox):
    """A container."""

    def __init__(self, name: str, provider: DockerProvider) -> None:
        super().__init__(name)
        self.provider = provider

    async def attach(self, argv: Sequence[str], stdin: bytes, user: str, on_part: OnPart) -> int:
        body: Mapping[str, Any] = {
            "AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "Cmd": list(argv), **({"User": user} if user else {}),
        }  # fmt: skip
        made = await self.provider.call("POST", f"/containers/{self.id}/exec", body, accepted=(404,))
        if made is None:
            self.lost = self.lost or "there is no such container"
            raise self.gone(self.lost)
        reader, writer = await asyncio.open_unix_connection(self.provider.socket, limit=1 << 20)
        try:
            await self._start(reader, writer, str(made["Id"]))
            await asyncio.gather(_feed(writer, stdin), _read_frames(reader, on_part))
        finally:
            writer.close()
        found = await self.provider.call("GET", f"/exec/{made['Id']}/json", accepted=(404,))
        if found is None or found.get("ExitCode") is None:
            raise self.gone(NO_EXIT)
        return int(found["ExitCode"])

    async def _start(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: str) -> None:
        """Start an exec, after which the connection carries its streams."""
        body = b'{"Detach": false, "Tty": false}'
        head = (
            f"POST /v1.41/exec/{number}/start HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\nConnection: Upgrade\r\n"
            f"Upgrade: tcp\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        async with asyncio.timeout(GRACE_S):
            answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = int(answer.split(" ", 2)[1])
        if status >= 400:
            text = (await reader.read(4096)).decode("utf-8", "replace")
            raise self.provider.read_failure(status, text)

    async def put_tree(self, path: str, archive: bytes) -> None:
        await self.copy_in(["mkdir", "-p", path], b"", path)
        await self.provider.call("PUT", f"/containers/{self.id}/archive?{urlencode({'path': path})}", archive)

    async def get_tree(self, path: str, limit_mb: int = 64) -> bytes:
        path = posixpath.normpath(path)
        data = await self.provider.call(
            "GET", f"/containers/{self.id}/archive?{urlencode({'path': path})}", accepted=(404,), raw=(limit_mb << 20) + 1
        )
        if data is None or len(data) > limit_mb << 20:
            why = "there is none" if data is None else "it is larger than allowed"
            raise SandboxFailure(FailureCause.REQUEST, f"{path!r:.200} cannot be copied: {why}")
        return cast(bytes, data)

    async def was_out_of_memory(self) -> bool:
        found = await self.provider.call("GET", f"/containers/{self.id}/json", accepted=(404,))
        return bool(found and found.get("State", {}).get("OOMKilled"))

    async def snapshot(self) -> str:
        made = await self.provider.call("POST", f"/commit?{urlencode({'container': self.id, 'repo': 'strop-snapshot'})}", {})
        return str(made["Id"])

    async def remove(self) -> None:
        self.provider.forget(self)
        await self.provider.delete(_removal(self.id))


def _removal(name: str) -> str:
    return f"/containers/{name}?force=true&v=true"


async def _feed(writer: asyncio.StreamWriter, stdin: bytes) -> None:
    try:
        writer.write(stdin)
        await writer.drain()
        writer.write_eof()
    except OSError:  # the command reads no more
        pass


async def _read_frames(reader: asyncio.StreamReader, on_part: OnPart) -> None:
    """Read frames of eight bytes (stream, length) and their data until the end."""
    names: tuple[Literal["stdout", "stderr"], ...] = ("stdout", "stdout", "stderr")
    while head := await reader.read(1):
        head += await reader.readexactly(7)
        stream, left = struct.unpack(">BxxxI", head)
        while left:
            part = await reader.read(min(left, 1 << 16))
            if not part:
                raise EOFError("the connection ended in the middle of a frame")
            left -= len(part)
            on_part(names[min(stream, 2)], part)
