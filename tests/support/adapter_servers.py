"""Stand-ins for servers of other libraries, in a thread, and real ones in processes with packages of their own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType, web

ADAPTERS = "STROP_ADAPTERS"  # the folder of environments that `make test-adapters` makes


def interpreter(name: str) -> str:
    """Return the interpreter that has a package. Skips the test where there is none."""
    python = Path(os.environ.get(ADAPTERS, "")) / name / "bin" / "python"
    if not os.environ.get(ADAPTERS) or not python.exists():
        pytest.skip(f"{name} is in an environment of its own: make test-adapters")
    return str(python)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(command: Sequence[str], port: int, folder: Path, *, path: str) -> Iterator[str]:
    """Run a server until the block ends. Yields its address once it answers at ``path``."""
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
            while True:
                try:
                    urllib.request.urlopen(url + path, timeout=5).close()
                    break
                except OSError:
                    assert process.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()[-2000:]
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(20)


@contextmanager
def served(app: web.Application) -> Iterator[str]:
    """Serve an application in a thread until the block ends. Yields its address."""
    loop, started, port = asyncio.new_event_loop(), threading.Event(), free_port()
    stop = asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(10)
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def openenv_echo(*, max_sessions: int = 1) -> web.Application:
    """Return a server that echoes, with the protocol of openenv-core 0.3.0 and the rewards of the example that it makes."""
    sessions: set[int] = set()

    async def schema(request: web.Request) -> web.Response:
        text = {"type": "string"}
        action = {"properties": {"metadata": {"type": "object"}, "message": text}, "required": ["message"]}
        seen = {
            "properties": {
                "done": {},
                "reward": {},
                "metadata": {},
                "echoed_message": text,
                "message_length": {"type": "integer"},
            }
        }
        return web.json_response({"action": action, "observation": seen, "state": {}})

    async def play(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)

        async def fail(code: str, message: str) -> None:
            await socket.send_json({"type": "error", "data": {"message": message, "code": code}})

        if len(sessions) >= max_sessions:
            await fail("CAPACITY_REACHED", "full")
            await socket.close()
            return socket
        sessions.add(id(socket))
        try:
            async for message in socket:
                request_ = json.loads(message.data) if message.type is WSMsgType.TEXT else {"type": "close"}
                said = request_.get("data", {}).get("message", "")
                if request_["type"] == "close":
                    break
                if request_["type"] == "step" and not isinstance(said, str):
                    await fail("VALIDATION_ERROR", "a message is a text")
                elif said == "crash":
                    await fail("EXECUTION_ERROR", "it crashed")
                else:
                    ready = f"ready {request_['data']['seed']}" if request_["type"] == "reset" else said
                    data = {"observation": {"echoed_message": ready, "message_length": len(said)}, "reward": len(said) * 0.1}
                    await socket.send_json({"type": "observation", "data": {**data, "done": said == "bye"}})
        finally:
            sessions.discard(id(socket))
        return socket

    app = web.Application()
    app.add_routes([web.get("/schema", schema), web.get("/ws", play)])
    return app


def nemo_gym_counter(config: dict[str, Any] | None = None) -> web.Application:
    """Return a resource server as nemo-gym 0.7.0 documents them: its example of a counter for each session, told apart by a cookie.

    It is its own head server, too.
    """
    counters: dict[str, int] = {}

    async def seed(request: web.Request) -> web.Response:
        body, name = await request.json(), f"s{len(counters)}"
        counters[name] = body["initial_count"]
        answer = web.json_response({})
        answer.set_cookie("session", name)
        return answer

    async def increment(request: web.Request) -> web.Response:
        body = await request.json()
        if not isinstance(body.get("count"), int):
            return web.json_response({"detail": "count is an integer"}, status=422)
        counters[request.cookies["session"]] += body["count"]
        return web.json_response({"success": True})

    async def read(request: web.Request) -> web.Response:
        return web.json_response({"count": counters[request.cookies["session"]]})

    async def verify(request: web.Request) -> web.Response:
        body = await request.json()
        right = counters[request.cookies["session"]] == body["expected_count"]
        called = any(item["type"] == "function_call" for item in body["response"]["output"])
        masked = body.get("mask", False)
        parts = {"correct": float(right), "called": float(called)}
        return web.json_response({**body, "reward": float(right), "reward_components": parts, "mask_sample": masked})

    async def reset(request: web.Request) -> web.Response:
        return web.json_response({"observation": "Say stop.", "info": {}})

    async def step(request: web.Request) -> web.Response:
        body = await request.json()
        said = body["response"]["output"][-1]["content"][0]["text"]
        return web.json_response(
            {"observation": "Again.", "reward": 1.0 if said == "stop" else -0.5, "terminated": said == "stop"}
        )

    async def global_config(request: web.Request) -> web.Response:
        return web.json_response(json.dumps(config))

    app = web.Application()
    posts = {
        "seed_session": seed,
        "increment_counter": increment,
        "get_counter_value": read,
        "verify": verify,
        "reset": reset,
        "step": step,
    }
    app.add_routes([web.post(f"/{path}", handler) for path, handler in posts.items()])
    app.add_routes([web.get("/global_config_dict_yaml", global_config)])
    return app
