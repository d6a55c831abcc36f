"""What providers that are reached over HTTP share: requests whose failures have causes, and the sandboxes that are open."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, ClassVar

from strop.extensions.sandboxes.base import FailureCause, SandboxFailure, UnsupportedSpec
from strop.extensions.sandboxes.supervised import RemoteProvider, has_ended

MAX_JSON = 64 << 20  # bytes
REQUEST_S = 300.0
LABEL = "strop-sandbox"  # which names the run that made a sandbox, where a service keeps labels
GONE: Mapping[int, FailureCause] = MappingProxyType({404: FailureCause.LOST, 502: FailureCause.LOST})


class HttpProvider(RemoteProvider):
    """Belongs to one event loop, whose connections it keeps. A subclass says where the service is and what its refusals mean."""

    name: ClassVar[str]
    service: ClassVar[str]  # in messages
    causes: ClassVar[Mapping[int, FailureCause]] = MappingProxyType({})  # of statuses; others: refused
    texts: ClassVar[Mapping[str, FailureCause]] = MappingProxyType({})  # of words in a refusal, in lower case: they come first
    through_proxy: ClassVar[bool] = False  # of HTTPS_PROXY
    context: ssl.SSLContext | None = None

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url.rstrip("/")
        self._session: Any = None

    @property
    def headers(self) -> Mapping[str, str]:
        return {}

    def make_connector(self) -> Any:
        import aiohttp

        return aiohttp.TCPConnector(limit=0, ssl=self.context or True)

    def connections(self) -> Any:
        import aiohttp

        if self._session is None:
            everything = aiohttp.ClientTimeout(None, sock_connect=30.0)
            self._session = aiohttp.ClientSession(
                connector=self.make_connector(), trust_env=self.through_proxy, timeout=everything
            )
        return self._session

    @asynccontextmanager
    async def connect(
        self, url: str, *, headers: Mapping[str, str], causes: Mapping[int, FailureCause], protocols: tuple[str, ...] = ()
    ) -> AsyncIterator[Any]:
        """Open a WebSocket to a whole URL. Raises SandboxFailure, with the cause ``lost`` if it breaks."""
        import aiohttp

        try:
            async with self.connections().ws_connect(url, headers=headers, protocols=protocols, max_msg_size=0) as channel:
                yield channel
        except aiohttp.WSServerHandshakeError as error:
            raise self.read_failure(error.status, error.message, causes=causes) from error
        except aiohttp.ClientError as error:
            raise SandboxFailure(FailureCause.LOST, f"the connection to the sandbox broke: {error}") from error

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: str,
        *,
        accepted: tuple[int, ...] = (),
        causes: Mapping[int, FailureCause] = MappingProxyType({}),
        broken: FailureCause = FailureCause.REFUSED,
        headers: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> AsyncIterator[Any]:
        """Send a request to a path of the API, or to a whole URL, which gets no ``self.headers``, and yield the answer.

        Raises SandboxFailure, with the cause ``broken`` if there is no answer or if it ends too early.
        """
        import aiohttp

        target, headers = (url, headers) if "://" in url else (self.url + url, {**self.headers, **headers})
        try:
            async with self.connections().request(method, target, headers=headers, **options) as answer:
                if answer.status >= 400 and answer.status not in accepted:
                    text = (await read_at_most(answer.content, 1 << 16)).decode("utf-8", "replace")
                    raise self.read_failure(answer.status, text, answer.headers.get("Retry-After", ""), causes)
                yield answer
        except (OSError, aiohttp.ClientError) as error:
            raise SandboxFailure(broken, f"{self.service} does not answer at {target.partition('?')[0]}: {error}") from error

    async def call(
        self, method: str, url: str, body: Any = None, *, raw: int = 0, within_s: float | None = REQUEST_S, **options: Any
    ) -> Any:
        """Send a request. Return the JSON of its answer, or ``raw`` bytes of it at most; None for a status in ``accepted``.

        Raises SandboxFailure.
        """
        if body is not None:
            kind = "application/x-tar" if isinstance(body, bytes) else "application/json"
            options["data"] = body if isinstance(body, bytes) else json.dumps(body).encode()
            options["headers"] = {"Content-Type": kind, **options.get("headers", {})}
        try:
            async with asyncio.timeout(within_s), self.request(method, url, **options) as answer:
                content = await read_at_most(answer.content, raw or MAX_JSON)
                return None if answer.status >= 400 else content if raw else json.loads(content or b"null")
        except (TimeoutError, ValueError) as error:
            raise SandboxFailure(FailureCause.REFUSED, f"{self.service} did not answer {method} {url}: {error!r}") from error

    async def delete(self, path: str) -> None:
        """Delete what is at a path of the API, if it still is. Raises SandboxFailure."""
        await self.call("DELETE", path, accepted=(404,))

    async def delete_ended(self, owners: Mapping[str, str]) -> int:
        """Delete those of the paths whose owners were processes of this machine and have ended. Return how many."""
        ended = [path for path, owner in owners.items() if has_ended(owner)]
        for path in ended:
            await self.delete(path)
        return len(ended)

    def read_failure(
        self, status: int, text: str, after: str = "", causes: Mapping[int, FailureCause] = MappingProxyType({})
    ) -> SandboxFailure:
        """Read why a service refused something."""
        cause = {429: FailureCause.THROTTLED, 507: FailureCause.DISK, **self.causes, **causes}.get(status, FailureCause.REFUSED)
        if status != 429:
            cause = next((cause for word, cause in self.texts.items() if word in text.lower()), cause)
        seconds = float(after) if re.fullmatch(r"\d+", after) else 0.0
        return SandboxFailure(cause, f"{self.service} refused ({status}): {text.strip()[:500]}", retry_after_s=seconds)

    async def close(self) -> None:
        await super().close()
        if self._session is not None:
            await self._session.close()
            self._session = None


async def read_at_most(stream: Any, limit: int) -> bytes:
    """Read a body up to a number of bytes, which a sandbox may have chosen."""
    kept = bytearray()
    while len(kept) < limit and (part := await stream.read(min(1 << 16, limit - len(kept)))):
        kept += part
    return bytes(kept)


def find_key(provider: str, variable: str) -> str:
    """Return the key of a service, which is never in a configuration. Raises UnsupportedSpec."""
    key = os.environ.get(variable, "")
    if not key:
        raise UnsupportedSpec(
            f"sandboxes.provider={provider} needs the key of your account in the environment variable {variable}"
        )
    return key
