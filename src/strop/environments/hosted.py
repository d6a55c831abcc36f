"""Environments in other processes: ``EnvironmentServer`` on the server side, ``RemoteEnvironment`` on the client side.

    client                                            server
    RemoteEnvironment, an Environment  - Transport -> EnvironmentServer.answer(method, arguments) -> CallResult
    RemoteTask (part, index, its texts)               the environment's own task, made from part and index
    the name of an open session                       environment.session(task), open in its own asyncio task

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
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, overload

from strop.data.errors import DataError
from strop.data.source import DataSource
from strop.environments.base import (
    Environment,
    EnvironmentConfigError,
    Judged,
    RewardError,
    Scored,
    reward_marks,
)
from strop.environments.registry import make_environment
from strop.types import Message, Messages, Rollout, Task

log = logging.getLogger(__name__)

T = TypeVar("T")

Method = Literal["spec", "task_count", "tasks", "open", "prompt", "respond", "score", "grade", "close"]
Call = Callable[[Method, tuple[Any, ...]], Awaitable["Reply"]]
"""Calls ``EnvironmentServer.answer``. Raises EnvironmentServerDied if the process died; the next call then reaches its replacement."""
BlockingCall = Callable[[Method, tuple[Any, ...]], "Reply"]

BLOCK = 32  # tasks in one request
REMEMBERED = 1024  # cached blocks per client, and cached tasks per server


class HostDied(RuntimeError):
    """The process of an environment died. The message says which."""


class SessionLost(RuntimeError):
    """The session of an episode was lost with its process, or was closed."""


class HostedError(Exception):
    """Any other exception that an environment raised in its process. Its type carries the original type's name."""


@dataclass(frozen=True, kw_only=True)
class HostedDescription:
    """Everything needed to build an environment in any process. Picklable."""

    alias: str  # key under ``env``
    name: str  # registered name, module:Class, or path/to/file.py:Class (relative to the process's working folder)
    options: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[DataSource, ...] = ()  # where tasks come from; a part is an index into this tuple


@dataclass(frozen=True)
class Reply:
    """The outcome of a call: a value or an exception."""

    value: Any = None
    raised: str = ""  # name of the exception's type; "" if the call succeeded
    message: str = ""
    trace: str = ""

    @staticmethod
    def of(error: Exception) -> Reply:
        return Reply(None, type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def unwrap(self) -> Any:
        """Return the value, or raise the exception."""
        if not self.raised:
            return self.value
        known = {kind.__name__: kind for kind in (RewardError, EnvironmentConfigError, DataError, SessionLost)}
        kind = known.get(self.raised) or type(self.raised, (HostedError,), {})
        error = kind(self.message)
        error.add_note(f"in the environment's process:\n{self.trace}")
        raise error


@dataclass(frozen=True)
class About:
    """Properties of an environment, fetched once: methods that it does not override need no calls."""

    title: str
    rewards: tuple[str, ...]
    accuracy: str | None  # name of the reward marked accuracy=True; None: the total reward
    own_accuracy: bool  # overrides Environment.accuracy
    responds: bool  # overrides Environment.respond
    has_session: bool  # overrides Environment.session
    votes: bool  # overrides Environment.answer_key


@dataclass(frozen=True, kw_only=True)
class RemoteTask(Task):
    """The client's view of a task."""

    part: int  # index into the description's ``sources``
    index: int


# --- server ---------------------------------------------------------------------------------------------------------------


class EnvironmentHost:
    """Serves one environment, its tasks and its open sessions. Methods raise the environment's exceptions; ``answer`` returns them."""

    def __init__(self, description: HostedDescription) -> None:
        """Store the description. Never raises: the first call reports what is wrong with the description."""
        self.description = description
        self._parts: dict[int, Sequence[Task]] = {}
        self._episodes: dict[str, _Episode] = {}
        self._numbers = itertools.count()
        self._token = secrets.token_hex(4)  # part of each session name, so that names of an earlier process are not reused
        self._task = functools.lru_cache(maxsize=REMEMBERED)(lambda part, index: self._tasks(part)[index])

    @functools.cached_property
    def environment(self) -> Environment[Any]:
        try:
            return make_environment(self.description.name, self.description.options)
        except EnvironmentConfigError as error:
            raise EnvironmentConfigError(f"env.{self.description.alias}: {error}") from error

    async def answer(self, method: Method, arguments: tuple[Any, ...]) -> Reply:
        """Call one of the methods below by name. Returns its exception instead of raising it."""
        try:
            return Reply(await getattr(self, method)(*arguments))
        except Exception as error:
            log.debug("%s of the environment %s failed", method, self.description.alias, exc_info=error)
            return Reply.of(error)

    async def spec(self) -> About:
        kind, marks = type(self.environment), reward_marks(type(self.environment))
        return About(
            title=self.environment.title,
            rewards=tuple(marks),
            accuracy=next((name for name, mark in marks.items() if mark.accuracy), None),
            own_accuracy=kind.accuracy is not Environment.accuracy,
            responds=kind.respond is not Environment.respond,
            has_session=kind.session is not Environment.session,
            votes=kind.answer_key is not Environment.answer_key,
        )

    async def task_count(self, part: int) -> int:
        """Return the number of tasks. Raises DataError or EnvironmentConfigError."""
        return len(self._tasks(part))

    async def tasks(self, part: int, indices: Sequence[int]) -> list[Reply]:
        """Return a ``RemoteTask``, or an exception, for each index."""
        return [self._described(part, index) for index in indices]

    async def open(self, part: int, index: int) -> str:
        """Open a session and return its name. It stays open until ``close``, or until a call in it raises."""
        episode = _Episode(self.environment, self._task(part, index))
        await episode.opened
        name = f"{self._token}/{next(self._numbers)}"
        self._episodes[name] = episode
        return name

    async def prompt(self, task: RemoteTask, session: str = "") -> tuple[Message, ...]:
        own = self._task(task.part, task.index)
        return tuple(await self._within(session, lambda: self.environment.first_messages(own)))

    async def respond(self, task: RemoteTask, rollout: Rollout, session: str = "") -> tuple[Message, ...] | None:
        own = self._task(task.part, task.index)
        said = await self._within(session, lambda: self.environment.respond(own, replace(rollout, task=own)))
        return None if said is None else tuple(said)

    async def score(self, task: RemoteTask, rollout: Rollout, session: str = "") -> Scored:
        own = self._task(task.part, task.index)
        return await self._within(session, lambda: self.environment.rewarded(own, replace(rollout, task=own)))

    async def grade(self, task: RemoteTask, rollout: Rollout) -> Judged:
        own = self._task(task.part, task.index)
        return await self.environment.judged(own, replace(rollout, task=own))

    async def close(self, session: str, failed: str = "") -> None:
        """Close a session. ``failed`` says why the episode ended without rewards; it is raised inside the session as an exception."""
        if (episode := self._episodes.pop(session, None)) is not None:
            await episode.end(failed)

    async def close_all(self) -> None:
        for session in list(self._episodes):
            with suppress(Exception):
                await self.close(session, "the environment's process is shutting down")

    async def _within(self, session: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` in the context of a session, or directly if ``session`` is empty. Raises SessionLost for an unknown session."""
        if not session:
            return await work()
        if (episode := self._episodes.get(session)) is None:
            raise SessionLost(f"{self.environment.title} has no session {session}: it was closed, or its process died")
        return await episode.ask(work)

    def _tasks(self, part: int) -> Sequence[Task]:
        if part not in self._parts:
            try:
                self._parts[part] = self.environment.tasks(self.description.sources[part])
            except (DataError, EnvironmentConfigError):
                raise
            except Exception as error:  # user code may raise anything
                where = f"env.{self.description.alias}: {self.environment.title}.tasks"
                raise EnvironmentConfigError(f"{where} raised {type(error).__name__}: {error}") from error
        return self._parts[part]

    def _described(self, part: int, index: int) -> Reply:
        try:
            task = self._task(part, index)
        except Exception as error:
            return Reply.of(error)
        seen = RemoteTask(
            id=task.id, question=task.question, answer=task.answer, metadata=dict(task.metadata), part=part, index=index
        )
        return Reply(seen)


class _Failed(Exception):
    """Raised inside a session whose episode failed elsewhere."""


_Work = Callable[[], Coroutine[Any, Any, Any]]


class _Episode:
    """An open session. One asyncio task runs its calls in sequence, so that they see the context variables that the session sets."""

    def __init__(self, environment: Environment[Any], task: Task) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox: asyncio.Queue[tuple[_Work, asyncio.Future[Any]]] = asyncio.Queue()
        self._told: Exception | None = None  # an exception that a caller has already received
        self._runner = asyncio.create_task(self._run(environment, task))

    async def ask(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` in the session's task. Raises SessionLost if the session has ended."""
        if self._runner.done():
            raise SessionLost("the session has ended because a call in it raised")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait((work, answer))
        either: list[asyncio.Future[Any]] = [answer, self._runner]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise SessionLost("the session ended before the call returned")
        return answer.result()

    async def end(self, failed: str) -> None:
        """Close the session, with an exception if ``failed`` is not empty. Raises what closing the session raises."""
        if not self._runner.done():

            async def finish() -> None:
                raise _Failed(failed) if failed else _Finished

            with suppress(_Failed, _Finished):
                await self.ask(finish)
        try:
            await self._runner
        except Exception as error:
            if error is not self._told:
                raise

    async def _run(self, environment: Environment[Any], task: Task) -> None:
        try:
            session = environment.session(task)
            await session.__aenter__()
        except Exception as error:
            self._told = error
            self.opened.set_exception(error)
            return
        self.opened.set_result(None)
        try:
            while True:
                await self._serve(*await self._inbox.get())
        except _Finished:
            await session.__aexit__(None, None, None)
        except (Exception, asyncio.CancelledError) as error:
            if not await session.__aexit__(type(error), error, error.__traceback__):
                raise

    async def _serve(self, work: _Work, answer: asyncio.Future[Any]) -> None:
        try:
            value = await work()
        except Exception as error:
            self._told = error
            if not answer.done():
                answer.set_exception(error)
            raise
        if not answer.done():
            answer.set_result(value)


class _Finished(Exception):
    """Raised inside a session task to close the session normally."""


# --- client ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """A connection to one server. ``call_sync`` is for calls outside of coroutines, mostly for tasks."""

    call: Call
    blocking: BlockingCall


def connect(description: HostedDescription, links: Sequence[Link]) -> RemoteEnvironment:
    """Connect to servers that all serve ``description``. Raises the server's exception if it cannot build the environment."""
    about: About = _asked_blocking(links[0], "spec", ())
    return RemoteEnvironment(description=description, about=about, links=tuple(links))


@dataclass(frozen=True, kw_only=True)
class RemoteEnvironment(Environment[RemoteTask]):
    """An environment whose methods run in other processes. Calls are distributed round-robin; a session stays in its process.

    A call outside of a session is retried once if its process died. A session in that process is lost: SessionLost.
    """

    description: HostedDescription
    about: About
    links: tuple[Link, ...] = field(repr=False)
    _turns: itertools.count[int] = field(default_factory=itertools.count, init=False, repr=False, compare=False)

    @property
    def title(self) -> str:
        return self.about.title

    @property
    def reward_names(self) -> tuple[str, ...]:
        return self.about.rewards

    def tasks(self, data: DataSource) -> RemoteTasks:
        if data not in self.description.sources:
            raise EnvironmentConfigError(
                f"env.{self.description.alias}: its process was created without the data source {data}; pass every source to "
                "EnvironmentDescription"
            )
        part, link = self.description.sources.index(data), self._next()
        return RemoteTasks(link, part, _asked_blocking(link, "task_count", (part,)))

    def prompt(self, task: RemoteTask) -> Messages:
        found: Messages = _asked_blocking(self._next(), "prompt", (task,))
        return found

    async def first_messages(self, task: RemoteTask) -> Messages:
        found: Messages = await self._asked("prompt", task)
        return found

    async def respond(self, task: RemoteTask, rollout: Rollout) -> Messages | None:
        found: Messages | None = await self._asked("respond", task, rollout) if self.about.responds else None
        return found

    async def rewarded(self, task: RemoteTask, rollout: Rollout) -> Scored:
        found: Scored = await self._asked("score", task, rollout)
        return found

    def session(self, task: RemoteTask) -> AbstractAsyncContextManager[Any]:
        return _RemoteSession(self, self._next(), task) if self.about.has_session else super().session(task)

    async def judged(self, task: RemoteTask, rollout: Rollout) -> Judged:
        if not (self.about.votes or self.about.own_accuracy):
            return Judged(self.accuracy(rollout), None)
        found: Judged = await _asked(self._next(), "grade", (task, rollout))
        return found

    def accuracy(self, rollout: Rollout) -> float:
        if self.about.own_accuracy:
            return self._judged_blocking(rollout).accuracy
        return rollout.reward if self.about.accuracy is None else rollout.rewards.get(self.about.accuracy, 0.0)

    def answer_key(self, task: RemoteTask, rollout: Rollout) -> str | None:
        return self._judged_blocking(rollout).answer if self.about.votes else None

    def _judged_blocking(self, rollout: Rollout) -> Judged:
        found: Judged = _asked_blocking(self._next(), "grade", (rollout.task, rollout))
        return found

    def _next(self) -> Link:
        return self.links[next(self._turns) % len(self.links)]

    async def _asked(self, method: Method, *arguments: Any) -> Any:
        """Call a method, inside the current context's session if it has one."""
        session = _session.get()
        if session is None or session.environment is not self:
            return await _asked(self._next(), method, arguments)
        return await session.asked(method, arguments)


_session: ContextVar[_RemoteSession | None] = ContextVar("strop_remote_session", default=None)


class _RemoteSession(AbstractAsyncContextManager["None"]):
    """Opens a session on the server. While it is open, calls from the same context run inside it."""

    def __init__(self, environment: RemoteEnvironment, link: Link, task: RemoteTask) -> None:
        self.environment, self.link, self.task = environment, link, task

    async def __aenter__(self) -> None:
        self._name: str = await _asked(self.link, "open", (self.task.part, self.task.index))
        self._before = _session.set(self)

    async def asked(self, method: Method, arguments: tuple[Any, ...]) -> Any:
        try:
            reply = await self.link.call(method, (*arguments, self._name))
        except HostDied as error:
            raise SessionLost(
                f"the process of the environment {self.environment.title} died during an episode's session ({error}); the session's "
                "state is lost"
            ) from error
        return reply.unwrap()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        _session.reset(self._before)
        failed = "" if error is None else f"{type(error).__name__}: {error}"
        try:
            reply = await self.link.call("close", (self._name, failed))
        except HostDied as gone:
            log.debug("the session %s was lost with its process: %s", self._name, gone)
        else:
            if error is None:
                reply.unwrap()


async def _asked(link: Link, method: Method, arguments: tuple[Any, ...]) -> Any:
    """Call a server, and once more its replacement if it died. Raises EnvironmentServerDied if that died too."""
    try:
        reply = await link.call(method, arguments)
    except HostDied as error:
        log.warning("%s; retrying %s on its replacement", error, method)
        reply = await link.call(method, arguments)
    return reply.unwrap()


def _asked_blocking(link: Link, method: Method, arguments: tuple[Any, ...]) -> Any:
    try:
        reply = link.blocking(method, arguments)
    except HostDied as error:
        log.warning("%s; retrying %s on its replacement", error, method)
        reply = link.blocking(method, arguments)
    return reply.unwrap()


class RemoteTasks(Sequence[RemoteTask]):
    """The tasks of one data source, fetched in blocks with an LRU cache."""

    def __init__(self, link: Link, part: int, size: int) -> None:
        self._link, self._part, self._size = link, part, size
        self._block = functools.lru_cache(maxsize=REMEMBERED)(self._fetched)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> RemoteTask: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RemoteTask]: ...
    def __getitem__(self, index: int | slice) -> RemoteTask | Sequence[RemoteTask]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self._size))]
        block, place = divmod(range(self._size)[index], BLOCK)
        task: RemoteTask = self._block(block)[place].unwrap()
        return task

    def _fetched(self, block: int) -> list[Reply]:
        indices = tuple(range(block * BLOCK, min((block + 1) * BLOCK, self._size)))
        found: list[Reply] = _asked_blocking(self._link, "tasks", (self._part, indices))
        return found
