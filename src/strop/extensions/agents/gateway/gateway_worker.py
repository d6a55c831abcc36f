"""A process of the gateway: it reads and answers the requests of its sessions, and asks the training process for completions.

It ends when the training process does, for whatever reason.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from strop.extensions.agents.gateway.agent_session import AgentSession, SessionOutcome
from strop.extensions.agents.gateway.gateway_config import GatewayConfig
from strop.extensions.agents.gateway.gateway_server import GatewayServer
from strop.extensions.agents.gateway.process_link import (
    Alive,
    BeginSession,
    Cancel,
    EndSession,
    Generate,
    Generated,
    Listening,
    Sampled,
    SessionBegun,
    SessionEnded,
    Start,
    UseTemplate,
    receive,
    send,
)
from strop.generation.base import Completion, InvalidRequest
from strop.models.chat_template import ChatTemplate
from strop.sampling import Sampling
from strop.types import PromptImage, Rollout, Task, Turn

ALIVE_SECONDS = 5.0  # between two signs of life
EMPTY = torch.zeros(0, dtype=torch.int64)


class EngineFailed(RuntimeError):
    """The engine failed; the training process has its error."""


class SessionEngine:
    """The engine of a session, in the training process."""

    version = 0

    def __init__(self, worker: GatewayWorker, session: int) -> None:
        self._worker, self._session = worker, session
        self.requests: dict[int, int] = {}  # by the id of the tokens that were sampled, which live as long as the session

    async def generate(
        self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "", images: Sequence[PromptImage] = ()
    ) -> Completion:
        request, result = await self._worker.generate(self._session, array("i", prompt), sampling, seed, tuple(images))
        tokens = torch.tensor(result.tokens, dtype=torch.int64)
        self.requests[id(tokens)] = request
        versions = torch.zeros(len(tokens), dtype=torch.int32)
        logprobs = torch.tensor(result.logprobs, dtype=torch.float32)
        return Completion(tokens=tokens, logprobs=logprobs, versions=versions, text=result.text, stopped=result.stopped)

    async def close(self) -> None: ...

    def strip(self, outcome: SessionOutcome) -> tuple[SessionOutcome, tuple[int, ...]]:
        """Return the outcome without the tokens of sampled turns, and the requests that sampled them."""
        rollout = outcome.rollout
        if rollout is None:
            return outcome, ()
        requests = tuple(self.requests[id(turn.tokens)] for turn in rollout.policy_turns)

        def strip(turns: Sequence[Turn]) -> tuple[Turn, ...]:
            return tuple(replace(turn, tokens=EMPTY, logprobs=EMPTY, versions=EMPTY) if turn.sampled else turn for turn in turns)

        branches = tuple(replace(branch, turns=strip(branch.turns)) for branch in rollout.branches)
        return replace(outcome, rollout=replace(rollout, turns=strip(rollout.turns), branches=branches)), requests


class GatewayWorker:
    """Serves the sessions that the training process opens."""

    def __init__(self, config: GatewayConfig, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._config, self._reader, self._writer = config, reader, writer
        self._server = GatewayServer(config)
        self._templates: dict[int, ChatTemplate] = {}
        self._sessions: dict[int, tuple[AgentSession, SessionEngine, ExitStack]] = {}
        self._numbers = count()
        self._results: dict[int, asyncio.Future[Any]] = {}  # by request
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, port: int) -> None:
        """Serve until the training process is gone."""
        async with self._server.listening(port) as address:
            send(self._writer, Listening(address))
            self._begin(self._show_life())
            while True:
                try:
                    message = await receive(self._reader)
                except EOFError:
                    return
                self._heed(message)

    def _heed(self, message: Any) -> None:
        match message:
            case Generated(request, result):
                future = self._results.get(request)
                if future is not None and not future.done():
                    future.set_result(result)
            case UseTemplate(number, template):
                self._templates[number] = template
            case BeginSession():
                self._open(message)
            case EndSession(number):
                self._begin(self._close(number))

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _show_life(self) -> None:
        while True:
            send(self._writer, Alive())
            await asyncio.sleep(ALIVE_SECONDS)

    def _open(self, opened: BeginSession) -> None:
        engine, stack = SessionEngine(self, opened.session), ExitStack()
        template = self._templates[opened.template]
        session = AgentSession(options=opened.options, generator=engine, template=template, config=self._config)
        stack.enter_context(self._server.serving(opened.key, session))
        self._sessions[opened.session] = (session, engine, stack)
        send(self._writer, SessionBegun(opened.session))

    async def _close(self, number: int) -> None:
        session, engine, stack = self._sessions.pop(number)
        stack.close()
        await session.close()
        empty = Rollout(task=Task(id=""), sample=session.options.sample, seed=session.options.seed, messages=(), prompt=EMPTY)
        outcome, requests = engine.strip(session.finish(empty))
        send(self._writer, SessionEnded(number, replace(outcome, failure=None), requests))

    async def generate(
        self, session: int, prompt: array[int], sampling: Sampling, seed: int, images: tuple[PromptImage, ...]
    ) -> tuple[int, Sampled]:
        """Let the training process sample. Returns the number of the request, and its result."""
        request = next(self._numbers)
        future = self._results[request] = asyncio.get_running_loop().create_future()
        try:
            send(self._writer, Generate(request, session, prompt, sampling, seed, images))
            result = await future
        except asyncio.CancelledError:
            send(self._writer, Cancel(request))
            raise
        finally:
            del self._results[request]
        if result is None:
            raise EngineFailed("the engine failed; the training process has its error")
        if isinstance(result, InvalidRequest):
            raise result
        return request, result


async def main(descriptor: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    start: Start = await receive(reader)
    torch.set_num_threads(1)
    await GatewayWorker(start.config, reader, writer).run(start.port)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
