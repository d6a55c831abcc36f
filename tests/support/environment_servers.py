"""Serve environments from other threads and processes over pickles, like a cluster but without one."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from strop.environments.base import Environment
from strop.environments.handle import EnvironmentHandle, LocalEnvironment
from strop.environments.remote import (
    CallResult,
    EnvironmentDescription,
    EnvironmentServer,
    EnvironmentServerDied,
    Method,
    Transport,
)


class EnvironmentServerThread:
    """An environment server on its own event loop. A method in ``deaths`` kills it; the next call reaches a new server."""

    def __init__(self, description: EnvironmentDescription) -> None:
        self.description = description
        self.calls: list[Method] = []
        self.deaths: list[Method] = []  # methods at whose next call it dies
        self.num_servers = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.dead: list[EnvironmentServer] = []
        self.server = self._start_server()

    def _start_server(self) -> EnvironmentServer:
        self.num_servers += 1
        description = pickle.loads(pickle.dumps(self.description))
        return asyncio.run_coroutine_threadsafe(_make_server(description), self._loop).result(10)

    def _begin(self, method: Method, arguments: tuple[Any, ...]) -> Future[CallResult]:
        self.calls.append(method)
        if method in self.deaths:
            self.deaths.remove(method)
            self.dead.append(self.server)
            self.server = self._start_server()
            raise EnvironmentServerDied(f"the server died in {method}")
        return asyncio.run_coroutine_threadsafe(self.server.answer(method, pickle.loads(pickle.dumps(arguments))), self._loop)

    async def _call(self, method: Method, arguments: tuple[Any, ...]) -> CallResult:
        reply = await asyncio.wrap_future(self._begin(method, arguments))
        return pickle.loads(pickle.dumps(reply))  # type: ignore[no-any-return]

    def _call_sync(self, method: Method, arguments: tuple[Any, ...]) -> CallResult:
        return pickle.loads(pickle.dumps(self._begin(method, arguments).result(10)))  # type: ignore[no-any-return]

    @property
    def transport(self) -> Transport:
        return Transport(self._call, self._call_sync)

    def close(self) -> None:
        for host in (*self.dead, self.server):
            asyncio.run_coroutine_threadsafe(host.close_all(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


async def _make_server(description: EnvironmentDescription) -> EnvironmentServer:
    return EnvironmentServer(description)


class EnvironmentServerProcess:
    """An environment server in its own process, restarted when it died."""

    def __init__(self, description: EnvironmentDescription) -> None:
        self.description = description
        self.starts = 0
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self.starts += 1
        ours, theirs = multiprocessing.Pipe()
        context: Any = multiprocessing.get_context("fork")
        self.process = context.Process(target=_serve, args=(theirs, self.description, ours), daemon=True)
        self.process.start()
        theirs.close()
        self._connection, self._waiting = ours, dict[int, Future[CallResult]]()
        self._numbers = iter(range(1 << 30))
        threading.Thread(target=self._listen, args=(ours, self._waiting), daemon=True).start()

    def _listen(self, connection: Connection, waiting: dict[int, Future[CallResult]]) -> None:
        try:
            while True:
                number, reply = connection.recv()
                waiting.pop(number).set_result(reply)
        except (EOFError, OSError):
            for future in list(waiting.values()):
                future.set_exception(EnvironmentServerDied(f"process {self.process.pid} is gone"))
            waiting.clear()

    def _begin(self, method: Method, arguments: tuple[Any, ...]) -> Future[CallResult]:
        with self._lock:
            if not self.process.is_alive():
                self._start()
            number, future = next(self._numbers), Future[CallResult]()
            self._waiting[number] = future
            try:
                self._connection.send((number, method, arguments))
            except OSError:
                self._waiting.pop(number, None)
                raise EnvironmentServerDied(f"process {self.process.pid} is gone") from None
            return future

    async def _call(self, method: Method, arguments: tuple[Any, ...]) -> CallResult:
        return await asyncio.wrap_future(self._begin(method, arguments))

    @property
    def transport(self) -> Transport:
        return Transport(self._call, lambda method, arguments: self._begin(method, arguments).result(20))

    def close(self) -> None:
        self.process.kill()
        self.process.join(10)


def _serve(connection: Connection, description: EnvironmentDescription, others: Connection) -> None:
    others.close()
    asyncio.run(_serve_requests(connection, EnvironmentServer, description))


async def _serve_requests(
    connection: Connection, make: Callable[[EnvironmentDescription], EnvironmentServer], description: EnvironmentDescription
) -> None:
    host, tasks = make(description), set[asyncio.Task[None]]()

    async def answered(number: int, method: Method, arguments: tuple[Any, ...]) -> None:
        connection.send((number, await host.answer(method, arguments)))

    while True:
        request = await asyncio.to_thread(connection.recv)
        task = asyncio.create_task(answered(*request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def handle_of(environment: Environment[Any] | EnvironmentHandle[Any]) -> EnvironmentHandle[Any]:
    return environment if isinstance(environment, EnvironmentHandle) else LocalEnvironment(environment)
