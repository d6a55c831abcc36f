"""Sandboxes of Daytona: its HTTP API makes them, and a daemon in each one, behind the service's proxy, runs commands.

The daemon passes on lines of text, so a command's output travels as lines of base64, and files as files. Read from the client package
daytona 0.226.1 and from the daemon's source; never run against the service.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import secrets
import shlex
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal
from urllib.parse import quote, urlencode

from strop.extensions.sandboxes.base import Capabilities, FailureCause, SandboxFailure, SandboxSpec, check_spec
from strop.extensions.sandboxes.http_provider import GONE, LABEL, HttpProvider, find_key
from strop.extensions.sandboxes.supervised import IN_SESSION, NO_EXIT, OnPart, SupervisedSandbox

POLL_S = 0.5
SNAPSHOT = "snapshot:"  # before the name of an image that is one
MAX_LINE = 1 << 16  # bytes; those of _RELAY have less than 3 KiB, which a pipe keeps whole
# Arguments: a folder, a mark, a file to read or /dev/null, the command. Prints "o BASE64" and "e BASE64" for its two streams, each of
# which ends with the mark, and "x CODE". What the command leaves running keeps the pipes open, so their ends say nothing.
_RELAY = """
d=$1 mark=$2 input=$3; shift 3
mkdir -p "$d" && mkfifo "$d/o" "$d/e" && exec 5<"$input" || exit 1
relay() { while c=$(dd bs=2048 count=1 2>/dev/null | base64 | tr -d '\\n') && [ -n "$c" ]; do echo "$1 $c"; done <"$d/$1"; }
relay o 5<&- & relay e 5<&- &
exec 3>"$d/o" 4>"$d/e"
rm -rf "$d"
"$@" <&5 >&3 2>&4 3>&- 4>&- 5<&-
code=$?
printf %s "$mark" >&3; printf %s "$mark" >&4
exec 3>&- 4>&-
echo "x $code"
wait
"""
_STREAMS: dict[bytes, Literal["stdout", "stderr"]] = {b"o": "stdout", b"e": "stderr"}


@dataclass(frozen=True, kw_only=True)
class DaytonaOptions:
    """Options of ``sandboxes.provider: daytona``. The key is that of DAYTONA_API_KEY."""

    target: str = ""  # the region; "": that of DAYTONA_TARGET, or the organization's
    max_hours: float = 24.0  # after which the service destroys a sandbox, whatever became of its run
    api_url: str = ""  # "": that of DAYTONA_API_URL, or https://app.daytona.io/api


class DaytonaProvider(HttpProvider):
    """Makes sandboxes of images that the service pulls, or of its snapshots: ``snapshot:NAME``, which also set the resources."""

    name = "daytona"
    service = "Daytona"
    through_proxy = True
    causes: ClassVar[Mapping[int, FailureCause]] = {404: FailureCause.IMAGE, 400: FailureCause.IMAGE}
    texts: ClassVar[Mapping[str, FailureCause]] = {"quota": FailureCause.REFUSED, "limit exceeded": FailureCause.REFUSED}
    options_type = DaytonaOptions
    capabilities = Capabilities(
        egress=frozenset({"none", "allow", "all"}),
        snapshot=True,
        users=False,
        tests="against a server of the same API, never the service",
    )

    def __init__(self, options: DaytonaOptions = DaytonaOptions()) -> None:
        self.options, self.key = options, find_key(self.name, "DAYTONA_API_KEY")
        super().__init__(options.api_url or os.environ.get("DAYTONA_API_URL") or "https://app.daytona.io/api")

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    async def create(self, spec: SandboxSpec) -> DaytonaSandbox:
        check_spec(spec, self.name, self.capabilities)
        made = await self.call("POST", "/sandbox", self._describe(spec))
        sandbox = DaytonaSandbox(str(made["id"]), self)
        self.add(sandbox)
        try:
            while made.get("state") != "started":
                if made.get("state") in ("error", "build_failed", "destroyed", "destroying"):
                    raise _read_error(spec.image, str(made.get("errorReason") or made["state"]))
                await asyncio.sleep(POLL_S)
                made = await self.call("GET", _path(sandbox.id), causes=GONE)
            sandbox.daemon = f"{made['toolboxProxyUrl'].rstrip('/')}/{sandbox.id}"
        except BaseException:
            await asyncio.shield(sandbox.destroy())
            raise
        return sandbox

    def _describe(self, spec: SandboxSpec) -> dict[str, Any]:
        target = self.options.target or os.environ.get("DAYTONA_TARGET", "")
        body: dict[str, Any] = {
            "env": dict(spec.environment),
            "labels": {LABEL: socket.gethostname(), f"{LABEL}-owner": self.owner},
            "networkBlockAll": spec.network.egress == "none",
            "autoStopInterval": 0,
            "autoDeleteInterval": 0,  # when it stops
            "ttlMinutes": math.ceil(self.options.max_hours * 60),
        }
        body |= {"domainAllowList": ",".join(spec.network.hosts)} if spec.network.hosts else {}
        body |= {"target": target} if target else {}
        if spec.image.startswith(SNAPSHOT):
            return body | {"snapshot": spec.image.removeprefix(SNAPSHOT)}
        resources = spec.resources
        limits = {
            "cpu": math.ceil(resources.cpus),
            "memory": _gigabytes(resources.memory_mb),
            "disk": _gigabytes(resources.disk_mb),
        }
        return body | limits | {"buildInfo": {"dockerfileContent": f"FROM {spec.image}\n"}}

    async def remove_snapshot(self, image: str) -> None:
        found = await self.call("GET", f"/snapshots/{quote(image.removeprefix(SNAPSHOT))}", accepted=(404,))
        if found is not None:
            await self.delete(f"/snapshots/{quote(found['id'])}")

    async def remove_left_over(self) -> int:
        """Remove sandboxes of runs of this machine that have ended. Those of other machines end after ``max_hours``."""
        found: list[Mapping[str, Any]] = []
        query, more = {"labels": json.dumps({LABEL: socket.gethostname()})}, True
        while more:
            page = await self.call("GET", f"/sandbox?{urlencode(query)}")
            found += page["items"]
            if more := bool(page.get("nextCursor")):
                query["cursor"] = page["nextCursor"]
        owners = {_path(each["id"]): (each.get("labels") or {}).get(f"{LABEL}-owner", "") for each in found}
        return await self.delete_ended(owners)


class DaytonaSandbox(SupervisedSandbox):
    """A sandbox of Daytona and its daemon."""

    def __init__(self, name: str, provider: DaytonaProvider) -> None:
        super().__init__(name)
        self.provider, self.daemon = provider, ""

    async def attach(self, argv: Sequence[str], stdin: bytes, user: str, on_part: OnPart) -> int:
        if user:
            raise SandboxFailure(FailureCause.REQUEST, "Daytona runs commands as the user of the image; leave user empty")
        mark = f"strop-{secrets.token_hex(12)}"
        folder, file = f"/tmp/.{mark}", f"/tmp/.{mark}-input" if stdin else "/dev/null"
        if stdin:
            await self._upload(file, stdin)
        words = ["/bin/sh", "-c", _RELAY, "sh", folder, mark, file, "/bin/sh", "-c", IN_SESSION, "sh", *argv]
        path = f"/process/session/{mark}"
        await self._call("POST", "/process/session", {"sessionId": mark})
        try:
            body = {"command": shlex.join(words), "runAsync": True, "suppressInputEcho": True}
            command = (await self._call("POST", f"{path}/exec", body))["cmdId"]
            output = _Output(mark, on_part)
            async for line in self._read_lines(f"{path}/command/{quote(command)}/logs?follow=true"):
                output.add(line)
                if output.code is not None and not output.open:
                    return output.code
        finally:
            self.later(self._clean(path, file if stdin else ""))
        raise self.gone(output.errors.decode("utf-8", "replace").strip()[-300:] or NO_EXIT)

    async def _read_lines(self, path: str) -> AsyncIterator[bytes]:
        url = self.daemon.replace("http", "ws", 1) + path
        rest = b""
        async with self.provider.connect(url, headers=self.provider.headers, causes=GONE) as channel:
            async for message in channel:
                data = message.data.encode() if isinstance(message.data, str) else message.data
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > MAX_LINE:
                    raise SandboxFailure(FailureCause.LOST, f"the sandbox {self.id} sends lines of more than {MAX_LINE} bytes")
                for line in lines:
                    yield line

    async def _clean(self, path: str, file: str) -> None:
        await self._call("DELETE", path, accepted=(404,))
        if file:
            await self._call("DELETE", f"/files?{urlencode({'path': file})}", accepted=(404,))

    async def _call(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """Send a request to the daemon, through the service's proxy."""
        url = self.daemon + path
        return await self.provider.call(method, url, body, headers=self.provider.headers, causes=GONE, **options)

    async def _upload(self, path: str, data: bytes) -> None:
        import aiohttp

        form = aiohttp.FormData()
        form.add_field("files[0].path", path)
        form.add_field("files[0].file", data, filename=path, content_type="application/octet-stream")
        url, headers = f"{self.daemon}/files/bulk-upload", self.provider.headers
        async with self.provider.request(
            "POST", url, data=form, headers=headers, causes=GONE, broken=FailureCause.LOST
        ) as answer:
            await answer.read()

    async def get_tree(self, path: str, limit_mb: int = 64) -> bytes:
        file = f"/tmp/.strop-{secrets.token_hex(8)}-tree"
        await self.pack(path, limit_mb, file)
        try:
            raw = (limit_mb << 20) + 1
            data: bytes = await self._call("GET", f"/files/download?{urlencode({'path': file})}", raw=raw)
        finally:
            self.later(self._call("DELETE", f"/files?{urlencode({'path': file})}", accepted=(404,)))
        if len(data) >= raw:
            raise SandboxFailure(FailureCause.REQUEST, f"{path!r:.200} cannot be copied: it is larger than allowed")
        return data

    async def snapshot(self) -> str:
        name, path = f"strop-{secrets.token_hex(8)}", _path(self.id)
        made = await self.provider.call("POST", f"{path}/snapshot", {"name": name}, causes=GONE)
        while made.get("state") == "snapshotting":
            await asyncio.sleep(POLL_S)
            made = await self.provider.call("GET", path, causes=GONE)
        if made.get("state") in ("error", "build_failed"):
            raise SandboxFailure(FailureCause.REFUSED, f"Daytona made no snapshot: {made.get('errorReason')}")
        return SNAPSHOT + name

    async def remove(self) -> None:
        self.provider.forget(self)
        await self.provider.delete(_path(self.id))


@dataclass
class _Output:
    """What the lines of _RELAY say."""

    mark: str
    on_part: OnPart
    code: int | None = None
    open: dict[Literal["stdout", "stderr"], bytes] = field(
        default_factory=lambda: {"stdout": b"", "stderr": b""}
    )  # what may be a mark
    errors: bytes = b""  # of the relay itself

    def add(self, line: bytes) -> None:
        line = line.lstrip(b"\x01\x02\r")
        kind, _, value = line.partition(b" ")
        stream = _STREAMS.get(kind)
        if kind == b"x":
            self.code = int(value)
        elif stream is None:
            self.errors = (self.errors + line + b"\n")[-1000:]
        elif stream in self.open:
            self._pass(stream, self.open[stream] + base64.b64decode(value))

    def _pass(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        """Pass on what cannot be the beginning of the mark."""
        mark = self.mark.encode()
        if data.endswith(mark):
            del self.open[stream]
            kept = len(mark)
        else:
            kept = next((size for size in range(len(mark), 0, -1) if data.endswith(mark[:size])), 0)
            self.open[stream] = data[len(data) - kept :]
        if part := data[: len(data) - kept]:
            self.on_part(stream, part)


def _path(name: str) -> str:
    return f"/sandbox/{quote(name)}"


def _gigabytes(megabytes: int) -> int:
    return max(1, math.ceil(megabytes / 1024))


def _read_error(image: str, reason: str) -> SandboxFailure:
    words = reason.lower()
    bad = any(word in words for word in ("manifest", "pull", "not found", "build", "no such image"))
    cause = FailureCause.IMAGE if bad else FailureCause.DISK if "no space" in words else FailureCause.REFUSED
    return SandboxFailure(cause, f"Daytona made no sandbox of {image}: {reason[:500]}")
