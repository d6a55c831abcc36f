"""Sandboxes of E2B: its HTTP API makes them, and a daemon in each one runs commands by Connect's protocol, with messages in JSON.

Read from the client package e2b 2.63.0 and from the daemon's source; never run against the service.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

from strop.extensions.sandboxes.base import Capabilities, FailureCause, SandboxFailure, SandboxSpec, check_spec
from strop.extensions.sandboxes.http_provider import GONE, LABEL, MAX_JSON, HttpProvider, find_key
from strop.extensions.sandboxes.supervised import IN_SESSION, NO_EXIT, OnPart, SupervisedSandbox

DAEMON_PORT = 49983
STDIN_PART = 1 << 20  # bytes of one request
_LAST = 2  # the flag of a stream's last message


@dataclass(frozen=True, kw_only=True)
class E2BOptions:
    """Options of ``sandboxes.provider: e2b``. The key is that of E2B_API_KEY."""

    domain: str = ""  # "": that of E2B_DOMAIN, or e2b.app
    user: str = "root"  # of commands that name none; "": that of the template
    max_hours: float = 1.0  # after which the service ends a sandbox, whatever became of its run
    api_url: str = ""  # "": https://api.DOMAIN
    sandbox_url: str = ""  # of the daemons, if one server passes requests on to all of them


class E2BProvider(HttpProvider):
    """Makes sandboxes of templates: the image is a template's name or number, which also sets their processors, memory and disk."""

    name = "e2b"
    service = "E2B"
    through_proxy = True
    causes: ClassVar[Mapping[int, FailureCause]] = {404: FailureCause.IMAGE, 400: FailureCause.IMAGE}
    options_type = E2BOptions
    capabilities = Capabilities(
        egress=frozenset({"none", "allow", "all"}),
        snapshot=True,
        users=False,
        tests="against a server of the same API, never the service",
    )

    def __init__(self, options: E2BOptions = E2BOptions()) -> None:
        self.options, self.key = options, find_key(self.name, "E2B_API_KEY")
        self.domain = options.domain or os.environ.get("E2B_DOMAIN", "") or "e2b.app"
        super().__init__(options.api_url or f"https://api.{self.domain}")

    @property
    def headers(self) -> Mapping[str, str]:
        return {"X-API-KEY": self.key}

    async def create(self, spec: SandboxSpec) -> E2BSandbox:
        check_spec(spec, self.name, self.capabilities)
        body = {
            "templateID": spec.image,
            "timeout": int(self.options.max_hours * 3600),
            "allow_internet_access": spec.network.egress != "none",
            "envVars": dict(spec.environment),
            "metadata": {LABEL: self.owner},
        }
        if spec.network.hosts:
            body["network"] = {"allowOut": list(spec.network.hosts), "denyOut": ["0.0.0.0/0"]}
        made = await self.call("POST", "/v2/sandboxes", body)
        sandbox = E2BSandbox(made["sandboxID"], self, made.get("domain") or self.domain, made.get("envdAccessToken") or "")
        self.add(sandbox)
        return sandbox

    async def remove_snapshot(self, image: str) -> None:
        await self.delete(f"/templates/{quote(image, safe='')}")

    async def remove_left_over(self) -> int:
        """Remove sandboxes of runs of this machine that have ended. Those of other machines end after ``max_hours``."""
        found: list[Mapping[str, Any]] = []
        token, more = "", True
        while more:
            query = urlencode({"state": "running,paused", "limit": 100, **({"nextToken": token} if token else {})})
            async with self.request("GET", f"/v2/sandboxes?{query}") as answer:
                page, token = await answer.json(), answer.headers.get("X-Next-Token", "")
            found += page
            more = bool(token)
        return await self.delete_ended({_path(each["sandboxID"]): (each.get("metadata") or {}).get(LABEL, "") for each in found})


class E2BSandbox(SupervisedSandbox):
    """A sandbox of E2B and its daemon."""

    def __init__(self, name: str, provider: E2BProvider, domain: str, token: str) -> None:
        super().__init__(name)
        self.provider = provider
        self.daemon = provider.options.sandbox_url or f"https://{DAEMON_PORT}-{name}.{domain}"
        address = {"E2b-Sandbox-Id": name, "E2b-Sandbox-Port": str(DAEMON_PORT)}
        self.headers = {**address, **({"X-Access-Token": token} if token else {})}

    async def attach(self, argv: Sequence[str], stdin: bytes, user: str, on_part: OnPart) -> int:
        process = {"cmd": "/bin/sh", "args": ["-c", IN_SESSION, "sh", *argv]}
        user = user or self.provider.options.user
        login = {"Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode()} if user else {}
        headers = {**self.headers, **login, "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1",
                   "Keepalive-Ping-Interval": "50"}  # fmt: skip
        message = json.dumps({"process": process, "stdin": bool(stdin)}).encode()
        data = struct.pack(">BI", 0, len(message)) + message
        feeding: asyncio.Task[None] | None = None
        url = f"{self.daemon}/process.Process/Start"
        try:
            async with self.provider.request(
                "POST", url, data=data, headers=headers, causes=GONE, broken=FailureCause.LOST
            ) as answer:
                async for event in _read_events(answer.content):
                    if "start" in event and stdin:
                        feeding = asyncio.ensure_future(self._feed(int(event["start"]["pid"]), stdin))
                    for stream in ("stdout", "stderr"):
                        if part := event.get("data", {}).get(stream):
                            on_part(stream, base64.b64decode(part))
                    if "end" in event:
                        return int(event["end"].get("exitCode", 0))
        finally:
            if feeding is not None:
                feeding.cancel()
        raise self.gone(NO_EXIT)

    async def _feed(self, process: int, stdin: bytes) -> None:
        selector = {"pid": process}
        with suppress(SandboxFailure):  # the command reads no more
            for at in range(0, len(stdin), STDIN_PART):
                part = base64.b64encode(stdin[at : at + STDIN_PART]).decode()
                await self._send("SendInput", {"process": selector, "input": {"stdin": part}})
            await self._send("CloseStdin", {"process": selector})

    async def _send(self, method: str, body: Mapping[str, Any]) -> None:
        await self.provider.call("POST", f"{self.daemon}/process.Process/{method}", body, headers=self.headers, causes=GONE)

    async def snapshot(self) -> str:
        """Keep the files, not the memory, as a template."""
        made = await self.provider.call("POST", f"{_path(self.id)}/snapshots", {"memory": False}, causes=GONE)
        return str(made["snapshotID"])

    async def remove(self) -> None:
        self.provider.forget(self)
        await self.provider.delete(_path(self.id))


def _path(name: str) -> str:
    return f"/sandboxes/{quote(name)}"


async def _read_events(stream: Any) -> AsyncIterator[Mapping[str, Any]]:
    """Read the messages of Connect's streams (a byte of flags, the length, JSON) to the last one. Raises SandboxFailure."""
    while True:
        try:
            flags, length = struct.unpack(">BI", await stream.readexactly(5))
            if length > MAX_JSON:
                raise ValueError(f"a message of {length} bytes")
            message = json.loads(await stream.readexactly(length))
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise SandboxFailure(FailureCause.LOST, f"the connection to the sandbox broke: {error}") from error
        if flags & _LAST:
            if refusal := message.get("error"):
                cause = FailureCause.THROTTLED if refusal.get("code") == "resource_exhausted" else FailureCause.LOST
                raise SandboxFailure(cause, f"the sandbox refused a command: {refusal}"[:500])
            return
        yield message.get("event", {})
