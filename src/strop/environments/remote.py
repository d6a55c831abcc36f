"""Environments in other processes: ``EnvironmentServer`` on the server side, ``RemoteEnvironment`` on the client side.

    client                                            server
    RemoteEnvironment, a handle - Transport -> EnvironmentServer.answer(method, arguments) -> CallResult
    RemoteTask (part, index, texts)            the environment's own task, created from part and index
    the name of an open session                LocalEnvironment.open(task), open in its own asyncio task

A ``Transport`` carries the calls. An exception from the environment returns as a ``CallResult`` and is raised on the client under its
original type name, so that a rollout records the same error as with a local environment. Tasks and sessions are never sent: the client
does not need the environment's own classes.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar, overload

from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.endings import Ending, find_ending
from strop.environments.base import EnvironmentConfigError
from strop.environments.forks import run_in_one_process
from strop.environments.handle import EnvironmentHandle, Grade, LocalEnvironment, Traits
from strop.environments.registry import make_environment
from strop.environments.resources import ResourceSections, configure_resources
from strop.environments.rewards import RewardError, RewardResult
from strop.safety.exits import contain_exits
from strop.safety.printable import shorten
from strop.tools.base import ParsedReply
from strop.tools.toolbox import ToolOffer
from strop.types import Message, Messages, Rollout, Task
from strop.user_code import MAX_ERROR_TEXT, describe_error

log = logging.getLogger(__name__)

T = TypeVar("T")

Method = Literal[
    "traits",
    "task_count",
    "tasks",
    "open",
    "prompt",
    "stop_strings",
    "run_agent",
    "respond",
    "offer_tools",
    "answer_calls",
    "score",
    "score_group",
    "grade",
    "close",
]
Call = Callable[[Method, tuple[Any, ...]], Awaitable["CallResult"]]
"""Calls ``EnvironmentServer.answer``. Raises EnvironmentServerDied if the process died; the next call then reaches its replacement."""
SyncCall = Callable[[Method, tuple[Any, ...]], "CallResult"]

TASKS_PER_FETCH = 32  # tasks in one request
CACHE_SIZE = 1024  # cached blocks per client, and cached tasks per server


class EnvironmentServerDied(RuntimeError):
    """The process of an environment died. The message says which."""

    ending = Ending.ENVIRONMENT


class SessionLost(RuntimeError):
    """The session of an episode was lost with its process, or was closed."""

    ending = Ending.ENVIRONMENT


class RemoteEnvironmentError(Exception):
    """Any other exception that an environment raised in its process. Its type carries the original type's name."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentDescription:
    """The settings needed to build an environment in any process. Picklable."""

    alias: str  # key under ``env``
    name: str  # registered name, module:Class, or path/to/file.py:Class (relative to the process's working folder)
    options: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[DataSource, ...] = ()  # where tasks come from; a part is an index into this tuple
    resources: ResourceSections = field(default_factory=dict)


@dataclass(frozen=True)
class CallResult:
    """The outcome of a call: a value or an exception."""

    value: Any = None
    error_type: str = ""  # name of the exception's type; "" if the call succeeded
    message: str = ""
    traceback: str = ""
    ending: Ending | None = None  # which the exception reports

    @staticmethod
    def from_exception(error: Exception) -> CallResult:
        text = shorten("".join(traceback.format_exception(error)), 4 * MAX_ERROR_TEXT)
        return CallResult(None, type(error).__name__, describe_error(error).partition(": ")[2], text, find_ending(error))

    def unwrap(self) -> Any:
        """Return the value, or raise the exception."""
        if not self.error_type:
            return self.value
        known = {kind.__name__: kind for kind in (RewardError, EnvironmentConfigError, DataError, SessionLost)}
        kind = known.get(self.error_type) or type(self.error_type, (RemoteEnvironmentError,), {})
        error = kind(self.message)
        if self.ending is not None:
            error.ending = self.ending  # type: ignore[attr-defined]
        error.add_note(f"in the environment's process:\n{self.traceback}")
        raise error


@dataclass(frozen=True, kw_only=True)
class RemoteTask(Task):
    """The client's view of a task."""

    former_names: ClassVar[tuple[str, ...]] = ("strop.environments.hosted:RemoteTask",)

    part: int  # index into the description's ``sources``
    index: int


# --- server ---------------------------------------------------------------------------------------------------------------


class EnvironmentServer:
    """Serves one environment, its tasks and its open sessions. Methods raise the environment's exceptions; ``answer`` returns them."""

    def __init__(self, description: EnvironmentDescription) -> None:
        """Store the description. Never raises: the first call reports what is wrong with the description."""
        self.description = description
        self._tasks_by_part: dict[int, Sequence[Task]] = {}
        self._sessions: dict[str, _OpenSession] = {}
        self._session_ids = itertools.count()
        self._server_id = secrets.token_hex(4)  # part of each session name, so that names of an earlier process are not reused
        self._get_task = functools.lru_cache(maxsize=CACHE_SIZE)(lambda part, index: self._load_tasks(part)[index])

    @functools.cached_property
    def environment(self) -> LocalEnvironment[Any]:
        configure_resources(self.description.resources)
        try:
            return LocalEnvironment(make_environment(self.description.name, self.description.options))
        except EnvironmentConfigError as error:
            raise EnvironmentConfigError(f"env.{self.description.alias}: {error}") from error

    async def answer(self, method: Method, arguments: tuple[Any, ...]) -> CallResult:
        """Call one of the methods below by name. Returns its exception instead of raising it."""
        try:
            with contain_exits():
                return CallResult(await run_in_one_process(getattr(self, method), *arguments))
        except Exception as error:
            log.debug("%s of the environment %s failed", method, self.description.alias, exc_info=error)
            return CallResult.from_exception(error)

    async def traits(self) -> Traits:
        """Return the environment's traits, without those that are valid only in its own process."""
        return replace(
            self.environment.traits, needed_resources=(), prompts_are_of_rows=False, past_selves=None, episode_state=None
        )

    async def task_count(self, part: int) -> int:
        """Return the number of tasks. Raises DataError or EnvironmentConfigError."""
        return len(self._load_tasks(part))

    async def tasks(self, part: int, indices: Sequence[int]) -> list[CallResult]:
        """Return a ``RemoteTask``, or an exception, for each index."""
        return [self._describe_task(part, index) for index in indices]

    async def open(self, part: int, index: int) -> str:
        """Open a session and return its name. It stays open until ``close``, or until a call in it raises."""
        episode = _OpenSession(self.environment, self._get_task(part, index))
        await episode.opened
        name = f"{self._server_id}/{next(self._session_ids)}"
        self._sessions[name] = episode
        return name

    async def prompt(self, task: RemoteTask, session: str = "") -> tuple[Message, ...]:
        local_task = self._get_task(task.part, task.index)
        return tuple(await self._run_in_session(session, lambda: self.environment.prompt(local_task)))

    async def run_agent(self, task: RemoteTask, endpoint: Any, session: str = "") -> Any:
        local_task = self._get_task(task.part, task.index)
        return await self._run_in_session(session, lambda: self.environment.run_agent(local_task, endpoint))

    async def offer_tools(self, session: str = "") -> ToolOffer | None:
        return await self._run_in_session(session, self.environment.offer_tools)

    async def answer_calls(
        self, task: RemoteTask, rollout: Rollout, reply: ParsedReply, session: str = ""
    ) -> tuple[tuple[Message, ...] | None, dict[str, float]]:
        """Return the messages of the tools, and the updated metrics of the rollout."""
        local = replace(rollout, task=self._get_task(task.part, task.index))
        messages = await self._run_in_session(session, lambda: self.environment.answer_calls(local, reply))
        return None if messages is None else tuple(messages), rollout.metrics

    async def stop_strings(self, task: RemoteTask, rollout: Rollout, session: str = "") -> tuple[str, ...]:
        local = replace(rollout, task=self._get_task(task.part, task.index))
        return tuple(await self._run_in_session(session, lambda: self.environment.stop_strings(local.task, local)))

    async def respond(
        self, task: RemoteTask, rollout: Rollout, session: str = ""
    ) -> tuple[tuple[Message, ...] | None, dict[str, float]]:
        """Return the messages of the environment, and the updated metrics of the rollout."""
        local_task = self._get_task(task.part, task.index)
        messages = await self._run_in_session(
            session, lambda: self.environment.respond(local_task, replace(rollout, task=local_task))
        )
        return None if messages is None else tuple(messages), rollout.metrics

    async def score(self, task: RemoteTask, rollout: Rollout, session: str = "") -> RewardResult:
        local_task = self._get_task(task.part, task.index)
        return await self._run_in_session(session, lambda: self.environment.score(local_task, replace(rollout, task=local_task)))

    async def score_group(self, task: RemoteTask, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        local_task = self._get_task(task.part, task.index)
        return await self.environment.score_group(local_task, [replace(rollout, task=local_task) for rollout in rollouts])

    async def grade(self, task: RemoteTask, rollout: Rollout) -> Grade:
        local_task = self._get_task(task.part, task.index)
        return await self.environment.grade(local_task, replace(rollout, task=local_task))

    async def close(self, session: str, failed: str = "") -> None:
        """Close a session. ``failed`` gives the reason if the episode ended without rewards; it is raised inside the session as
        an exception.
        """
        if (episode := self._sessions.pop(session, None)) is not None:
            await episode.close(failed)

    async def close_all(self) -> None:
        for session in list(self._sessions):
            with suppress(Exception):
                await self.close(session, "the environment's process is shutting down")

    async def _run_in_session(self, session: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` in the context of a session, or directly if ``session`` is empty. Raises SessionLost for an unknown session."""
        if not session:
            return await work()
        if (episode := self._sessions.get(session)) is None:
            raise SessionLost(f"{self.environment.traits.title} has no session {session}: it was closed, or its process died")
        return await episode.run(work)

    def _load_tasks(self, part: int) -> Sequence[Task]:
        if part not in self._tasks_by_part:
            try:
                with contain_exits():
                    self._tasks_by_part[part] = self.environment.tasks(self.description.sources[part])
            except (DataError, EnvironmentConfigError):
                raise
            except Exception as error:  # user code may raise anything
                where = f"env.{self.description.alias}: {self.environment.traits.title}.tasks"
                raise EnvironmentConfigError(
                    f"{where} raised {type(error).__name__}: {shorten(str(error), MAX_ERROR_TEXT)}"
                ) from error
        return self._tasks_by_part[part]

    def _describe_task(self, part: int, index: int) -> CallResult:
        try:
            with contain_exits():
                task = self._get_task(part, index)
        except Exception as error:
            return CallResult.from_exception(error)
        remote_task = RemoteTask(
            id=task.id, question=task.question, answer=task.answer, metadata=dict(task.metadata), part=part, index=index
        )
        return CallResult(remote_task)


class _EpisodeFailed(Exception):
    """Raised inside a session whose episode failed elsewhere."""


_Work = Callable[[], Coroutine[Any, Any, Any]]


class _OpenSession:
    """An open session. One asyncio task runs its calls in sequence, so that they see the context variables that the session sets."""

    def __init__(self, environment: LocalEnvironment[Any], task: Task) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue: asyncio.Queue[tuple[_Work, asyncio.Future[Any]]] = asyncio.Queue()
        self._reported: Exception | None = None  # an exception that a caller has already received
        self._runner = asyncio.create_task(run_in_one_process(self._serve_forever, environment, task))

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` in the session's task. Raises SessionLost if the session has ended."""
        if self._runner.done():
            raise SessionLost("the session has ended because a call in it raised")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((work, future))
        futures: list[asyncio.Future[Any]] = [future, self._runner]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise SessionLost("the session ended before the call returned")
        return future.result()

    async def close(self, failed: str) -> None:
        """Close the session, with an exception if ``failed`` is not empty. Raises what closing the session raises."""
        if not self._runner.done():

            async def finish() -> None:
                raise _EpisodeFailed(failed) if failed else _EpisodeFinished

            with suppress(_EpisodeFailed, _EpisodeFinished):
                await self.run(finish)
        try:
            await self._runner
        except Exception as error:
            if error is not self._reported:
                raise

    async def _serve_forever(self, environment: LocalEnvironment[Any], task: Task) -> None:
        try:
            with contain_exits():
                session = environment.open(task)
                await session.__aenter__()
        except Exception as error:
            self._reported = error
            self.opened.set_exception(error)
            return
        self.opened.set_result(None)
        try:
            while True:
                await self._serve_one(*await self._queue.get())
        except _EpisodeFinished:
            await session.__aexit__(None, None, None)
        except (Exception, asyncio.CancelledError) as error:
            if not await session.__aexit__(type(error), error, error.__traceback__):
                raise

    async def _serve_one(self, work: _Work, future: asyncio.Future[Any]) -> None:
        try:
            with contain_exits():
                value = await work()
        except Exception as error:
            self._reported = error
            if not future.done():
                future.set_exception(error)
            raise
        if not future.done():
            future.set_result(value)


class _EpisodeFinished(Exception):
    """Raised inside a session task to close the session normally."""


# --- client ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transport:
    """A connection to one server. ``call_sync`` is for calls outside of coroutines, mostly for tasks."""

    call: Call
    call_sync: SyncCall


def connect(description: EnvironmentDescription, transports: Sequence[Transport]) -> RemoteEnvironment:
    """Connect to servers that all serve ``description``. Raises the server's exception if it cannot build the environment."""
    traits: Traits = _call_remote_sync(transports[0], "traits", ())
    return RemoteEnvironment(description=description, traits=traits, transports=tuple(transports))


@dataclass(frozen=True, kw_only=True)
class RemoteEnvironment(EnvironmentHandle[RemoteTask]):
    """An environment in other processes. Calls are distributed round-robin; a session stays in its process.

    A call outside of a session is retried once if its process died. A session in that process is lost: SessionLost.
    """

    description: EnvironmentDescription
    traits: Traits
    transports: tuple[Transport, ...] = field(repr=False)
    _round_robin: itertools.count[int] = field(default_factory=itertools.count, init=False, repr=False, compare=False)

    def tasks(self, data: DataSource) -> RemoteTasks:
        if data not in self.description.sources:
            raise EnvironmentConfigError(
                f"env.{self.description.alias}: its process was created without the data source {data}; pass every source to "
                "EnvironmentDescription"
            )
        part, transport = self.description.sources.index(data), self._next_transport()
        return RemoteTasks(transport, part, _call_remote_sync(transport, "task_count", (part,)))

    def open(self, task: RemoteTask) -> AbstractAsyncContextManager[Any]:
        return _RemoteSession(self, self._next_transport(), task) if self.traits.has_session else nullcontext()

    async def prompt(self, task: RemoteTask) -> Messages:
        messages: Messages = await self._call("prompt", task)
        return messages

    async def stop_strings(self, task: RemoteTask, rollout: Rollout) -> Sequence[str]:
        stops: Sequence[str] = await self._call("stop_strings", task, rollout) if self.traits.has_stop_strings else ()
        return stops

    async def respond(self, task: RemoteTask, rollout: Rollout) -> Messages | None:
        if not self.traits.responds:
            return None
        messages: Messages | None
        messages, metrics = await self._call("respond", task, rollout)
        rollout.metrics.update(metrics)
        return messages

    async def offer_tools(self) -> ToolOffer | None:
        offer: ToolOffer | None = await self._call("offer_tools") if self.traits.has_tools else None
        return offer

    async def answer_calls(self, rollout: Rollout, reply: ParsedReply) -> Messages | None:
        messages: Messages | None
        messages, metrics = await self._call("answer_calls", rollout.task, rollout, reply)
        rollout.metrics.update(metrics)
        return messages

    async def run_agent(self, task: RemoteTask, endpoint: Any) -> Any:
        return await self._call("run_agent", task, endpoint)

    async def score(self, task: RemoteTask, rollout: Rollout) -> RewardResult:
        result: RewardResult = await self._call("score", task, rollout)
        rollout.metrics.update(result.metrics)
        return result

    async def score_group(self, task: RemoteTask, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        results: Sequence[RewardResult] = await _call_remote(self._next_transport(), "score_group", (task, rollouts))
        for rollout, result in zip(rollouts, results, strict=True):
            rollout.metrics.update(result.metrics)
        return results

    async def grade(self, task: RemoteTask, rollout: Rollout) -> Grade:
        if not (self.traits.has_answer_key or self.traits.overrides_accuracy):
            return Grade(self.accuracy(rollout), None)
        grade: Grade = await _call_remote(self._next_transport(), "grade", (task, rollout))
        return grade

    def accuracy(self, rollout: Rollout) -> float:
        if self.traits.overrides_accuracy:
            grade: Grade = _call_remote_sync(self._next_transport(), "grade", (rollout.task, rollout))
            return grade.accuracy
        name = self.traits.accuracy_reward
        return rollout.reward if name is None else rollout.rewards.get(name, 0.0)

    def _next_transport(self) -> Transport:
        return self.transports[next(self._round_robin) % len(self.transports)]

    async def _call(self, method: Method, *arguments: Any) -> Any:
        """Call a method, inside the current context's session if it has one."""
        session = _current_session.get()
        if session is None or session.environment is not self:
            return await _call_remote(self._next_transport(), method, arguments)
        return await session.call(method, arguments)


_current_session: ContextVar[_RemoteSession | None] = ContextVar("strop_remote_session", default=None)


class _RemoteSession(AbstractAsyncContextManager["None"]):
    """Opens a session on the server. While it is open, calls from the same context run inside it."""

    def __init__(self, environment: RemoteEnvironment, transport: Transport, task: RemoteTask) -> None:
        self.environment, self.transport, self.task = environment, transport, task

    async def __aenter__(self) -> None:
        self._name: str = await _call_remote(self.transport, "open", (self.task.part, self.task.index))
        self._token = _current_session.set(self)

    async def call(self, method: Method, arguments: tuple[Any, ...]) -> Any:
        try:
            result = await self.transport.call(method, (*arguments, self._name))
        except EnvironmentServerDied as error:
            raise SessionLost(
                f"the process of the environment {self.environment.traits.title} died during an episode's session ({error}); the session's "
                "state is lost"
            ) from error
        return result.unwrap()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        _current_session.reset(self._token)
        failed = "" if error is None else f"{type(error).__name__}: {shorten(str(error), MAX_ERROR_TEXT)}"
        try:
            result = await self.transport.call("close", (self._name, failed))
        except EnvironmentServerDied as died:
            log.debug("the session %s was lost with its process: %s", self._name, died)
        else:
            if error is None:
                result.unwrap()


async def _call_remote(transport: Transport, method: Method, arguments: tuple[Any, ...]) -> Any:
    """Call a server, and once more its replacement if it died. Raises EnvironmentServerDied if that died too."""
    try:
        result = await transport.call(method, arguments)
    except EnvironmentServerDied as error:
        log.warning("%s; retrying %s on its replacement", error, method)
        result = await transport.call(method, arguments)
    return result.unwrap()


def _call_remote_sync(transport: Transport, method: Method, arguments: tuple[Any, ...]) -> Any:
    try:
        result = transport.call_sync(method, arguments)
    except EnvironmentServerDied as error:
        log.warning("%s; retrying %s on its replacement", error, method)
        result = transport.call_sync(method, arguments)
    return result.unwrap()


class RemoteTasks(Sequence[RemoteTask]):
    """The tasks of one data source, fetched in blocks with an LRU cache."""

    def __init__(self, transport: Transport, part: int, size: int) -> None:
        self._transport, self._part, self._size = transport, part, size
        self._get_block = functools.lru_cache(maxsize=CACHE_SIZE)(self._fetch_block)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> RemoteTask: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RemoteTask]: ...
    def __getitem__(self, index: int | slice) -> RemoteTask | Sequence[RemoteTask]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        block, offset = divmod(range(self._size)[index], TASKS_PER_FETCH)
        task: RemoteTask = self._get_block(block)[offset].unwrap()
        return task

    def _fetch_block(self, block: int) -> list[CallResult]:
        indices = tuple(range(block * TASKS_PER_FETCH, min((block + 1) * TASKS_PER_FETCH, self._size)))
        results: list[CallResult] = _call_remote_sync(self._transport, "tasks", (self._part, indices))
        return results
