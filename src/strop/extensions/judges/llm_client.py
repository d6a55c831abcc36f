"""Ask a language model at an OpenAI-compatible endpoint: judges, simulated users, anything that an environment has to ask.

    complete() on any event loop -> the thread of this process's clients -> cache -> limits -> HTTP, again if it may pass

The requests of all clients of a process run on one event loop in a separate thread, so that limits hold however many loops ask, and
neither JSON nor TLS is on the loop that generates.
"""

from __future__ import annotations

import asyncio
import atexit
import email.utils
import hashlib
import json
import logging
import os
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.endings import Ending
from strop.environments.base import EnvironmentConfigError
from strop.extensions.judges.llm_endpoint import LlmEndpoint
from strop.packages import install_command, is_installed
from strop.safety.printable import shorten
from strop.types import Message

if TYPE_CHECKING:
    import aiohttp


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StoredReply:
    """What is kept of a reply: neither the request nor a key."""

    text: str
    finish_reason: str
    input_tokens: int
    output_tokens: int


class ReplyCache:
    """Keeps the newest ``size`` replies, and all of them in ``folder`` if there is one. Only one thread uses it."""

    def __init__(self, size: int, folder: Path | None = None) -> None:
        self._size = size
        self._folder = folder
        self._replies: OrderedDict[str, StoredReply] = OrderedDict()

    @staticmethod
    def key(request: dict[str, Any]) -> str:
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> StoredReply | None:
        reply = self._replies.get(key)
        if reply is None and self._folder is not None and (reply := self._read(self._path(key))) is not None:
            self._remember(key, reply)
        if reply is not None:
            self._replies.move_to_end(key)
        return reply

    def put(self, key: str, reply: StoredReply) -> None:
        self._remember(key, reply)
        if self._folder is not None:
            self._write(self._path(key), reply)

    def _remember(self, key: str, reply: StoredReply) -> None:
        self._replies[key] = reply
        if len(self._replies) > self._size:
            self._replies.popitem(last=False)

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key}.json"

    def _read(self, path: Path) -> StoredReply | None:
        """Return the reply of a file, None if there is none or it cannot be read."""
        try:
            return StoredReply(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            log.warning("the cached reply %s cannot be read (%s): the model is asked again", path, error)
            return None

    def _write(self, path: Path, reply: StoredReply) -> None:
        """Write a reply whole or not at all. A cache that cannot be written is a warning: the reply itself is good."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(asdict(reply)), encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            log.warning("the reply could not be cached in %s: %s", path, error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


MAX_ERROR_BODY = 500  # characters of a server's answer that an error shows
LIMITS = (402, 429)  # statuses of a quota and of a rate limit
RETRIED = (408, 409, 425, 429)  # and 5xx
FIRST_BACKOFF_S = 0.5
CHARACTERS_PER_TOKEN = 4  # a guess, for the token limit, until the server has said how many tokens there were


class LlmError(RuntimeError):
    """An endpoint gave no reply. The message says which one and why."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.ending = Ending.PROVIDER_LIMIT if status in LIMITS else Ending.SERVICE


class _Passing(Exception):
    """A failure that may pass; ``wait`` is what the server asked for."""

    def __init__(self, text: str, wait: float | None = None, status: int | None = None) -> None:
        super().__init__(text)
        self.wait, self.status = wait, status


@dataclass(frozen=True, kw_only=True)
class LlmReply:
    text: str
    finish_reason: str = "stop"  # "length" where max_tokens cut it
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0  # by the endpoint's prices; 0 from the cache
    cached: bool = False
    retries: int = 0
    seconds: float = 0.0  # with waiting


@dataclass(frozen=True, kw_only=True)
class LlmUsage:
    """What a client has used so far."""

    replies: int = 0
    cached: int = 0
    retries: int = 0
    failures: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0


class LlmClient:
    """A client of one endpoint. Use ``get_llm_client``, so that everybody in a process shares its limits and its cache."""

    def __init__(self, endpoint: LlmEndpoint) -> None:
        """Raises EnvironmentConfigError if the package or the key is missing."""
        if not is_installed("aiohttp"):
            raise EnvironmentConfigError(
                f"asking a language model over HTTP needs the package aiohttp: {install_command('judge')}"
            )
        self.endpoint = endpoint
        self.usage = LlmUsage()
        self._key = _read_key(endpoint.api_key_env)
        folder = None if endpoint.cache_dir is None else Path(endpoint.cache_dir).expanduser()
        self._cache = None if endpoint.cache == "off" else ReplyCache(endpoint.cache_size, folder)
        self._asking: dict[str, asyncio.Task[LlmReply]] = {}  # by cache key: the same question at the same time is asked once
        self._session: aiohttp.ClientSession | None = None
        self._free = asyncio.Semaphore(endpoint.concurrency)
        self._requests, self._tokens = RateLimit(endpoint.requests_per_minute), RateLimit(endpoint.tokens_per_minute)
        self._not_before = 0.0  # of the clock: the server asked every client to wait

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        seed: int | None = None,
        sample: int = 0,
        **sampling: Any,
    ) -> LlmReply:
        """Return the model's reply to a conversation. Raises LlmError.

        ``sample`` tells replies to the same question apart in the cache, where several are wanted; more of ``sampling`` (``top_p``,
        ``stop``, ...) goes into the request as it is.
        """
        request = {
            "model": self.endpoint.model,
            "messages": [_write_message(message) for message in messages],
            "temperature": temperature,
            "max_tokens": max_tokens,
            **({} if seed is None else {"seed": seed}),
            **sampling,
            **self.endpoint.extra_body,
        }
        with _making:
            loop = _get_loop(os.getpid())
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._answer(request, sample), loop))

    # --- on the loop of the clients' thread -------------------------------------------------------------------------------

    async def _answer(self, request: dict[str, Any], sample: int) -> LlmReply:
        if self._cache is None:
            return await self._ask(request)
        key = ReplyCache.key({"url": self.endpoint.url, "request": request, "sample": sample})
        if (stored := self._cache.get(key)) is not None:
            self._count(replies=1, cached=1)
            return LlmReply(**asdict(stored), cached=True)
        if (asking := self._asking.get(key)) is not None:
            reply = await asyncio.shield(asking)
            self._count(replies=1, cached=1)
            return replace(reply, cached=True, cost=0.0)
        asking = self._asking[key] = asyncio.ensure_future(self._ask(request))
        asking.add_done_callback(lambda done: self._finish(key, done))
        return await asyncio.shield(asking)  # others may wait for it too

    def _finish(self, key: str, asking: asyncio.Task[LlmReply]) -> None:
        del self._asking[key]
        if not asking.cancelled() and asking.exception() is None and self._cache is not None:
            reply = asking.result()
            tokens = {"input_tokens": reply.input_tokens, "output_tokens": reply.output_tokens}
            self._cache.put(key, StoredReply(text=reply.text, finish_reason=reply.finish_reason, **tokens))

    async def _ask(self, request: dict[str, Any]) -> LlmReply:
        """Ask until there is a reply, or a failure that does not pass. Raises LlmError."""
        started = time.monotonic()
        for attempt in range(self.endpoint.max_retries + 1):
            try:
                async with self._free:
                    reply = await self._attempt(request)
            except _Passing as error:
                wait = min(FIRST_BACKOFF_S * 2**attempt, self.endpoint.max_backoff_s) * (0.5 + random.random() / 2)
                if error.wait is not None:
                    wait = error.wait
                    self._not_before = max(self._not_before, time.monotonic() + min(wait, self.endpoint.max_backoff_s))
                if attempt == self.endpoint.max_retries or wait > self.endpoint.max_backoff_s:
                    self._count(failures=1)
                    raise LlmError(self._describe_failure(str(error), attempt + 1, wait), error.status) from error
                self._count(retries=1)
                log.debug("%s: %s; asking again in %.1f s", self.endpoint.url, error, wait)
                await asyncio.sleep(wait)
            except LlmError:
                self._count(failures=1)
                raise
            else:
                self._count(replies=1, input_tokens=reply.input_tokens, output_tokens=reply.output_tokens, cost=reply.cost)
                return replace(reply, retries=attempt, seconds=time.monotonic() - started)
        raise AssertionError("the last attempt returns or raises")

    def _describe_failure(self, why: str, attempts: int, wait: float) -> str:
        if wait > self.endpoint.max_backoff_s:
            how = f"it asks to wait {wait:.0f} s, which is more than max_backoff_s ({self.endpoint.max_backoff_s:g})"
        else:
            how = f"{attempts} attempts failed (max_retries {self.endpoint.max_retries})"
        return f"{self.endpoint.model} at {self.endpoint.base_url} gave no reply: {why}; {how}"

    async def _attempt(self, request: dict[str, Any]) -> LlmReply:
        while (wait := self._not_before - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        await self._requests.reserve()
        guess = len(json.dumps(request["messages"])) / CHARACTERS_PER_TOKEN + float(request.get("max_tokens") or 0)
        reserved = await self._tokens.reserve(guess)
        status, headers, body = await self._post(request)
        if status != 200:
            raise self._refusal(status, headers, body)
        reply = self._read_reply(body)
        reserved.amount = reply.input_tokens + reply.output_tokens or guess
        return reply

    async def _post(self, request: dict[str, Any]) -> tuple[int, Mapping[str, str], str]:
        """Return status, headers and body of the answer. Raises _Passing if there is none."""
        import aiohttp

        if self._session is None:
            # Redirects are not followed: the key is only for this address.
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self.endpoint.timeout_s),
                connector=aiohttp.TCPConnector(limit=0),
                trust_env=True,
            )
            _open_clients.append(self)
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        try:
            async with self._session.post(self.endpoint.url, json=request, headers=headers, allow_redirects=False) as response:
                return response.status, response.headers, await response.text(errors="replace")
        except TimeoutError:
            raise _Passing(f"no answer within timeout_s ({self.endpoint.timeout_s:g} s)") from None
        except aiohttp.ClientError as error:
            raise _Passing(f"{type(error).__name__}: {self._without_key(str(error))}") from None

    def _refusal(self, status: int, headers: Mapping[str, str], body: str) -> Exception:
        text = f"status {status}: {self._without_key(shorten(body, MAX_ERROR_BODY))}"
        passing = (status in RETRIED or status >= 500) and "insufficient_quota" not in body
        if passing:
            return _Passing(text, read_retry_after(headers), status)
        advice = {
            401: "; set api_key_env to the variable that holds its key",
            403: "; set api_key_env to the variable that holds a key with access",
            404: "; check base_url, which usually ends with /v1, and model",
        }
        moved = f" to {headers.get('Location', '')}; set base_url to that address" if 300 <= status < 400 else ""
        refused = f"{self.endpoint.model} at {self.endpoint.base_url} refused: {text}{moved}{advice.get(status, '')}"
        return LlmError(refused, 429 if "insufficient_quota" in body else status)

    def _read_reply(self, body: str) -> LlmReply:
        try:
            answer = json.loads(body)
            choice, usage = answer["choices"][0], answer.get("usage") or {}
            text = choice["message"].get("content") or ""
            tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
            if not isinstance(text, str):
                raise TypeError("content is not text")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise _Passing(
                f"its answer is not a chat completion ({type(error).__name__}): {shorten(body, MAX_ERROR_BODY)}"
            ) from None
        return LlmReply(
            text=text,
            finish_reason=str(choice.get("finish_reason") or "stop"),
            input_tokens=tokens[0],
            output_tokens=tokens[1],
            cost=self.endpoint.cost(*tokens),
        )

    def _without_key(self, text: str) -> str:
        return text if self._key is None else text.replace(self._key, "<redacted>")

    def _count(self, **added: float) -> None:
        self.usage = replace(self.usage, **{name: getattr(self.usage, name) + value for name, value in added.items()})

    async def _close(self) -> None:
        if self._session is not None:
            await self._session.close()


def get_llm_client(endpoint: LlmEndpoint) -> LlmClient:
    """Return this process's client of an endpoint. A forked process gets its own. Raises EnvironmentConfigError."""
    with _making:
        clients = _clients_of(os.getpid())
        key = json.dumps(asdict(endpoint), sort_keys=True, default=str)
        if key not in clients:
            clients[key] = LlmClient(endpoint)
        return clients[key]


_making = threading.Lock()
_open_clients: list[LlmClient] = []


@lru_cache(maxsize=1)
def _clients_of(process: int) -> dict[str, LlmClient]:
    return {}


@lru_cache(maxsize=1)
def _get_loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of this process's clients, which runs in a separate thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="strop-llm", daemon=True).start()
    _open_clients.clear()
    atexit.register(_close_clients, loop, process)
    return loop


def _close_clients(loop: asyncio.AbstractEventLoop, process: int) -> None:
    async def close() -> None:
        for client in _open_clients:
            await client._close()

    if os.getpid() == process:
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(close(), loop).result(timeout=2)


def _write_message(message: Message) -> dict[str, Any]:
    """Return a message as OpenAI's API reads it: arguments of tool calls are JSON there."""
    written = message.as_dict()
    written.pop("reasoning_content", None)
    for call, wire in zip(message.tool_calls, written.get("tool_calls", ()), strict=True):
        wire["function"]["arguments"] = json.dumps(dict(call.arguments))
    return written


def _read_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable, "").strip()):
        raise EnvironmentConfigError(f"api_key_env names {variable}, which is not set; export the key of the endpoint in it")
    return key


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait: retry-after-ms, or Retry-After in seconds or as a date."""
    with suppress(KeyError, ValueError):
        return max(0.0, float(headers["retry-after-ms"]) / 1000)
    given = headers.get("Retry-After", "")
    with suppress(ValueError):
        return max(0.0, float(given))
    with suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
    return None


# At most so much in any window of time.


@dataclass
class Reservation:
    """A part of the limit, from a moment on. ``amount`` may be corrected when it is known."""

    amount: float
    time: float


class RateLimit:
    """Lets at most ``limit`` through in any ``window`` seconds, in the order of asking. For the coroutines of one event loop."""

    def __init__(self, limit: float | None, *, window: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.window = window
        self._clock = clock
        self._reserved: deque[Reservation] = deque()
        self._turn = asyncio.Lock()

    async def reserve(self, amount: float = 1.0) -> Reservation:
        """Wait until ``amount`` fits and return its reservation. More than the limit passes when nothing else is reserved."""
        if self.limit is None:
            return Reservation(amount, 0.0)
        async with self._turn:
            while (wait := self._seconds_until_it_fits(amount)) > 0:
                await asyncio.sleep(wait)
            reservation = Reservation(amount, self._clock())
            self._reserved.append(reservation)
            return reservation

    def _seconds_until_it_fits(self, amount: float) -> float:
        assert self.limit is not None
        now = self._clock()
        while self._reserved and self._reserved[0].time + self.window <= now:
            self._reserved.popleft()
        excess = sum(each.amount for each in self._reserved) + amount - self.limit
        wait = 0.0
        for each in self._reserved:  # the oldest leave the window first
            if excess <= 0:
                break
            excess -= each.amount
            wait = each.time + self.window - now
        return wait
