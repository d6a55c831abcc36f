"""A process of the gateway, as the training process sees it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from strop.endings import Ending, failing_as
from strop.extensions.agents.gateway.agent_session import SessionOptions, SessionOutcome
from strop.extensions.agents.gateway.gateway_config import GatewayConfig
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
from strop.generation.base import Completion, Generator, InvalidRequest
from strop.models.chat_template import ChatTemplate
from strop.monitoring.waits import waiting
from strop.rollouts.policy_turns import check_columns
from strop.types import Branch, Rollout, Turn

log = logging.getLogger(__name__)

WORKER = "strop.extensions.agents.gateway.gateway_worker"
START_SECONDS = 120.0
SILENCE_SECONDS = 60.0  # without a sign of life, after which a process is killed


class GatewayDied(RuntimeError):
    """The process that served an episode died, and with it what the agent was told. The message says how."""

    ending = Ending.SERVICE


@dataclass(eq=False)
class ServedSession:
    """A session in a process of the gateway, and what was sampled for it."""

    number: int
    options: SessionOptions
    generator: Generator
    context: Context  # of the episode
    lost: Callable[[], object]  # called if the process dies
    opened: asyncio.Future[None]
    closed: asyncio.Future[SessionEnded]
    completions: dict[int, Completion] = field(default_factory=dict)  # by request
    failure: Exception | None = None  # of the engine

    async def finish(self, rollout: Rollout) -> SessionOutcome:
        """Return the outcome, once the process has closed the session. Raises GatewayDied."""
        closed = await self.closed
        outcome = replace(closed.outcome, failure=self.failure)
        if outcome.rollout is None:
            return outcome
        completions = iter([self.completions[request] for request in closed.requests])
        found = outcome.rollout
        rollout.metrics.update(found.metrics)
        grown = replace(
            rollout,
            messages=found.messages,
            prompt=found.prompt,
            images=found.images,
            turns=_fill_turns(found.turns, completions, whole=True),
            branches=tuple(
                Branch(parent=branch.parent, start=branch.start, turns=_fill_turns(branch.turns, completions))
                for branch in found.branches
            ),
            ending=found.ending,
        )
        return replace(outcome, rollout=grown)


def _fill_turns(turns: Sequence[Turn], completions: Iterator[Completion], *, whole: bool = False) -> tuple[Turn, ...]:
    """Return the turns with what was sampled. ``whole``: the first one keeps what was recorded of the prompt."""
    filled: list[Turn] = []
    read = 1
    for turn in turns:
        if not turn.sampled:
            read = len(turn.tokens) + 1
            filled.append(turn)
            continue
        found = next(completions)
        turn = replace(turn, tokens=found.tokens, logprobs=found.logprobs, versions=found.versions, columns=found.columns)
        filled.append(turn if whole and not filled else turn.with_last_read(read))
        read = 1
    return tuple(filled)


class GatewayProcess:
    """Starts a process, opens sessions in it, and samples for them."""

    def __init__(self, config: GatewayConfig, port: int) -> None:
        self._config, self._port = config, port
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._address: asyncio.Future[str] | None = None
        self._starting = asyncio.Lock()
        self._sessions: dict[int, ServedSession] = {}
        self._numbers = count()
        self._templates: dict[int, ChatTemplate] = {}  # by id; held, so that no other object gets it
        self._sampling: dict[int, asyncio.Task[None]] = {}  # by request
        self._tasks: set[asyncio.Task[None]] = set()
        self._silence = 0.0
        self.load = 0  # sessions, also those that wait for it to start
        self.death = ""  # how the last process ended

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> str:
        """Start the process, unless it runs. Returns its address. Raises GatewayDied."""
        async with self._starting:
            if self._address is None:
                own, other = socket.socketpair()
                with other:
                    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
                    command = [sys.executable, "-m", WORKER, str(other.fileno())]
                    self._process = await asyncio.create_subprocess_exec(
                        *command, pass_fds=[other.fileno()], env=environ, start_new_session=True, stdin=asyncio.subprocess.DEVNULL
                    )
                reader, self._writer = await asyncio.open_connection(sock=own)
                self._address = asyncio.get_running_loop().create_future()
                self._silence = SILENCE_SECONDS - START_SECONDS
                send(self._writer, Start(self._config, self._port))
                self._begin(self._listen(reader, self._process))
                self._begin(self._watch(self._process))
            address = self._address
        return await asyncio.shield(address)

    async def stop(self) -> None:
        """End the process. It holds nothing that its closed sessions have not returned."""
        if self._process is not None and self._writer is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._writer.close()
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def serving(
        self, key: str, options: SessionOptions, generator: Generator, template: ChatTemplate, lost: Callable[[], object]
    ) -> AsyncIterator[ServedSession]:
        """Serve a session in the started process to agents whose key has this digest. ``lost`` is called if the process dies."""
        if self._process is None or self._writer is None:
            raise GatewayDied("the process of the gateway that was to serve this episode has just died")
        if id(template) not in self._templates:
            self._templates[id(template)] = template
            send(self._writer, UseTemplate(id(template), template))
        loop = asyncio.get_running_loop()
        opened, closed = loop.create_future(), loop.create_future()
        for future in (opened, closed):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # a cancelled episode does not ask
        session = ServedSession(next(self._numbers), options, generator, copy_context(), lost, opened, closed)
        self._sessions[session.number] = session
        # the mask is recorded here, and the process has no columns
        light = replace(options, sampling=replace(options.sampling, record_sampling_mask=False))
        send(self._writer, BeginSession(session.number, key, light, id(template)))
        try:
            await opened
            yield session
        finally:
            if session.number in self._sessions:  # not lost
                send(self._writer, EndSession(session.number))

    def _begin(self, work: Any, context: Context | None = None) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _listen(self, reader: asyncio.StreamReader, process: asyncio.subprocess.Process) -> None:
        try:
            while True:
                self._heed(await receive(reader))
        except EOFError:
            pass
        except Exception:
            log.exception("a message of the gateway's process %d cannot be read", process.pid)
            process.kill()
        await self._lose(process)

    def _heed(self, message: Any) -> None:
        self._silence = 0.0
        match message:
            case Generate():
                session = self._sessions[message.session]
                task = self._sampling[message.request] = self._begin(self._generate(session, message), session.context.copy())
                task.add_done_callback(lambda _: self._sampling.pop(message.request, None))
            case Cancel(request):
                if request in self._sampling:
                    self._sampling[request].cancel()
            case SessionBegun(number):
                if not (opened := self._sessions[number].opened).done():  # cancelled
                    opened.set_result(None)
            case SessionEnded(number):
                closed = self._sessions.pop(number).closed
                if not closed.done():
                    closed.set_result(message)
            case Listening(address):
                if self._address is not None and not self._address.done():
                    self._address.set_result(address)
            case Alive():
                pass

    async def _generate(self, session: ServedSession, asked: Generate) -> None:
        """Sample for a session. An error of the engine is the episode's; one of the request goes back to the agent."""
        sampling = replace(asked.sampling, record_sampling_mask=session.options.sampling.record_sampling_mask)
        shown: dict[str, Any] = {"images": asked.images} if asked.images else {}
        result: Sampled | InvalidRequest | None = None
        try:
            with (
                failing_as(Ending.ENGINE),
                waiting(f"sample {session.options.sample}", on=f"engine, request {asked.request}", kind="generation"),
            ):
                completion = await session.generator.generate(
                    asked.prompt.tolist(), sampling=sampling, seed=asked.seed, session=f"{session.options.seed:x}", **shown
                )
                check_columns(completion, session.generator, session.options.sampling)
            tokens, logprobs = array("i", completion.tokens.tolist()), array("f", completion.logprobs.tolist())
            session.completions[asked.request] = completion
            result = Sampled(tokens, logprobs, completion.text, completion.stopped)
        except InvalidRequest as error:
            result = error
        except Exception as error:
            session.failure = session.failure or error
        if self._writer is not None:
            send(self._writer, Generated(asked.request, result))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill the process if it is silent for long. A step of the clock counts once, however long this process was busy."""
        while process.returncode is None and self._process is process:
            await asyncio.sleep(1.0)
            self._silence += 1.0
            if self._silence > SILENCE_SECONDS:
                log.error("the gateway's process %d has been silent for %g s and is killed", process.pid, SILENCE_SECONDS)
                process.kill()
                return

    async def _lose(self, process: asyncio.subprocess.Process) -> None:
        """Account for the sessions of a process that has ended, and get ready to start another."""
        code = await process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        address, sessions = self._address, list(self._sessions.values())
        self._process = self._address = None
        self._sessions, self._templates = {}, {}
        for task in self._sampling.values():
            task.cancel()
        if address is not None and not address.done():
            address.set_exception(GatewayDied(f"a process of the gateway did not start: it {how}"))
        self.death = f"the gateway's process {process.pid} {how}, and with it the episodes that it served"
        for session in sessions:
            for future in (session.opened, session.closed):
                if not future.done():
                    future.set_exception(GatewayDied(self.death))
            session.lost()
