"""Requests to an SGLang server over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

# Seconds that an unused connection is kept: less than the 5 after which SGLang's server closes it, perhaps while a request is being sent.
KEEP_ALIVE = 2.0


class ServerError(RuntimeError):
    """The server answered that it cannot do what was asked; the message is its own."""


class ServerClient:
    """A client of one server. Bound to the event loop that it is first used on."""

    def __init__(self, port: int, key: str) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession(
                self.address,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None),  # a completion takes as long as it takes
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
                read_bufsize=1 << 20,
            )
        return self._session

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer. Raises ServerError, and OSError or aiohttp.ClientError if the connection fails."""
        async with self._open().post(path, json=body or {}) as response:
            answer = (
                await response.json(content_type=None) if response.content_type == "application/json" else await response.text()
            )
            if response.status != 200:
                raise ServerError(f"{path}: {_read_message(answer)} (status {response.status})")
            return answer

    async def is_ready(self) -> bool:
        """Whether the server takes requests."""
        import aiohttp

        try:
            async with self._open().get("/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status == 200
        except (OSError, TimeoutError, aiohttp.ClientError):
            return False

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _read_message(answer: Any) -> str:
    if isinstance(answer, dict):
        error = answer.get("error", answer.get("message", answer))
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return str(answer)
