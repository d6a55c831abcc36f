"""Bodies of OpenAI's API that no server may answer with an error of its own, and clients that send what the usual ones do not."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from typing import Any

SURROGATE = "\ud800"
HELLO = [{"role": "user", "content": "1+1="}]
DEEP = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

# Path under /v1, and the body: valid JSON that asks for what cannot be.
REFUSED: tuple[tuple[str, Any], ...] = (
    *(("chat/completions", {"messages": HELLO, "stop": stop}) for stop in ([SURROGATE], "a\udfff", [5], {"a": 1}, ["x" * 70_000])),
    *(("chat/completions", {"messages": HELLO, "temperature": value}) for value in (1e-300, 1e-40, -1, 1e999, True, "1", [1])),
    *(("chat/completions", {"messages": HELLO, "top_p": value}) for value in (1e-300, 0, 1.5, float("nan"))),
    *(("chat/completions", {"messages": HELLO, name: float("inf")}) for name in ("n", "seed", "max_tokens", "top_k", "min_p")),
    *(("chat/completions", {"messages": HELLO, name: 10**400}) for name in ("n", "temperature")),
    *(("completions", {"prompt": prompt}) for prompt in ([[True, True]], [True], [10**9], [[3, 2**63]], [-1], [1.5], [[]], [], None,
        {"a": 1}, ["ok", SURROGATE], SURROGATE, [SURROGATE], ["a"] * 3000, [[5], "a", None], list(range(5)) * 1000)),
    *(("chat/completions", {"messages": messages}) for messages in ([{"role": "user", "content": SURROGATE}], [5], {}, "hi",
        [{"role": "user", "content": "hi", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}])),
)  # fmt: skip


def draw_bodies(seed: int, count: int) -> Iterator[tuple[str, Any]]:
    """Yield requests that are mostly odd in one or two places, some of which can be answered."""
    draw = random.Random(seed)
    values: tuple[Any, ...] = (None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 0.5, 1e-300, 1e300, float("nan"), float("inf"), "", "7",
        SURROGATE, "\U0001f600", [], [1], [True], [[1]], [SURROGATE], {}, {"type": "text"})  # fmt: skip
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "max_tokens", "max_completion_tokens", "stream", "logprobs",
        "tools", "tool_choice", "parallel_tool_calls", "stream_options", "response_format", "presence_penalty", "user")  # fmt: skip
    for _ in range(count):
        body: dict[str, Any] = {
            "max_tokens": 3,
            **{name: draw.choice(values) for name in draw.sample(names, draw.choice((0, 1, 1, 2)))},
        }
        good = draw.random() < 0.7
        if draw.random() < 0.5:
            yield "chat/completions", {"messages": HELLO if good else [{"role": "user", "content": draw.choice(values)}], **body}
        else:
            yield (
                "completions",
                {"prompt": [5, 9, 40] if good else draw.choice(([5, draw.choice(values)], draw.choice(values))), **body},
            )


def send(address: str, path: str, body: Any, headers: dict[str, str], method: str = "POST") -> tuple[int, bytes]:
    """Send a request as it is: ``body`` as bytes or as JSON, header values with any bytes, with no Host but that in ``headers``."""
    host, _, port = address.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            connection.putheader(name, value.encode("utf-8", "surrogateescape"))
        connection.endheaders(data)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
