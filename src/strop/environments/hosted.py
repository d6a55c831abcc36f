"""Environments that live in another process: one end there (``EnvironmentHost``), one end here (``RemoteEnvironment``).

    here                                              there
    RemoteEnvironment, an Environment  -- Link -->    EnvironmentHost.answer(method, arguments) -> Reply
    RemoteTask (part, index, its texts)               the environment's own task, made from part and index
    an open session, by its name                      environment.session(task), open in an asyncio task of its own

How calls get across is the ``Link``'s business. What an environment raises comes back as a ``Reply`` and is raised here under the name it
had there, so that a rollout records what it would have recorded with the environment in this process. Tasks and sessions never travel:
the environment's own classes need not be known here.
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

Method = Literal["about", "task_count", "tasks", "open", "prompt", "respond", "score", "judge", "close"]
Call = Callable[[Method, tuple[Any, ...]], Awaitable["Reply"]]
"""``EnvironmentHost.answer`` over there. Raises HostDied where the process is gone; the next call then reaches its replacement."""
BlockingCall = Callable[[Method, tuple[Any, ...]], "Reply"]

BLOCK = 32  # tasks that are asked for at a time
REMEMBERED = 1024  # blocks here, and tasks there


class HostDied(RuntimeError):
    """The process in which an environment lives is gone; the message says which."""


class SessionLost(RuntimeError):
    """An episode whose session was open in a process that died: what it had done there is gone."""


class HostedError(Exception):
    """Whatever an environment raised in its process; its type has the name of the one that was raised there."""


@dataclass(frozen=True, kw_only=True)
class HostedDescription:
    """What an environment is made from, in whichever process. Pickles."""

    alias: str  # under ``env``
    name: str  # registered, or module:Class, or path/to/file.py:Class (from the process's working folder)
    options: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[DataSource, ...] = ()  # what tasks are made from: each a part, known by its place


@dataclass(frozen=True)
class Reply:
    """What became of a call: a value, or what was raised."""

    value: Any = None
    raised: str = ""  # the name of the exception's type
    message: str = ""
    trace: str = ""

    @staticmethod
    def of(error: Exception) -> Reply:
        return Reply(None, type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def unwrap(self) -> Any:
        """The value; raises what was raised."""
        if not self.raised:
            return self.value
        known = {kind.__name__: kind for kind in (RewardError, EnvironmentConfigError, DataError, SessionLost)}
        kind = known.get(self.raised) or type(self.raised, (HostedError,), {})
        error = kind(self.message)
        error.add_note(f"in the environment's process:\n{self.trace}")
        raise error


@dataclass(frozen=True)
class About:
    """What an environment is like, asked once: what it does not do needs no call."""

    title: str
    rewards: tuple[str, ...]
    accuracy: str | None  # the reward that is the accuracy; None: the total
    own_accuracy: bool  # it computes the accuracy itself
    responds: bool
    has_session: bool
    votes: bool  # it knows final answers


@dataclass(frozen=True, kw_only=True)
class RemoteTask(Task):
    """A task as far as it is known outside of its environment's process."""

    part: int  # of the description's ``sources``
    index: int


# --- there ----------------------------------------------------------------------------------------------------------------


class EnvironmentHost:
    """One environment, its tasks and the sessions that are open. Methods raise what the environment raises; ``answer`` does not."""

    def __init__(self, description: HostedDescription) -> None:
        """Never raises: what is wrong with the description is the answer to the first call."""
        self.description = description
        self._parts: dict[int, Sequence[Task]] = {}
        self._episodes: dict[str, _Episode] = {}
        self._numbers = itertools.count()
        self._token = secrets.token_hex(4)  # a name of a process before this one is nobody's
        self._task = functools.lru_cache(maxsize=REMEMBERED)(self._made)

    @functools.cached_property
    def environment(self) -> Environment[Any]:
        try:
            return make_environment(self.description.name, self.description.options)
        except EnvironmentConfigError as error:
            raise EnvironmentConfigError(f"env.{self.description.alias}: {error}") from error

    async def answer(self, method: Method, arguments: tuple[Any, ...]) -> Reply:
        """What ``Link`` carries: one of the methods below, by name."""
        try:
            return Reply(await getattr(self, method)(*arguments))
        except Exception as error:
            log.debug("%s of the environment %s failed", method, self.description.alias, exc_info=error)
            return Reply.of(error)

    async def about(self) -> About:
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
        """Raises DataError, EnvironmentConfigError."""
        return len(self._tasks(part))

    async def tasks(self, part: int, indices: Sequence[int]) -> list[Reply]:
        """A ``RemoteTask`` for each index, or why there is none."""
        return [self._described(part, index) for index in indices]

    async def open(self, part: int, index: int) -> str:
        """The name of a new session, which stays open until ``close``, or until something in it raises."""
        episode = _Episode(self.environment, self._task(part, index))
        await episode.opened
        name = f"{self._token}/{next(self._numbers)}"
        self._episodes[name] = episode
        return name

    async def prompt(self, task: RemoteTask, session: str = "") -> tuple[Message, ...]:
        own = self._task(task.part, task.index)
        return await self._within(session, lambda: self._prompted(own))

    async def respond(self, task: RemoteTask, rollout: Rollout, session: str = "") -> tuple[Message, ...] | None:
        own = self._task(task.part, task.index)
        said = await self._within(session, lambda: self.environment.respond(own, replace(rollout, task=own)))
        return None if said is None else tuple(said)

    async def score(self, task: RemoteTask, rollout: Rollout, session: str = "") -> Scored:
        own = self._task(task.part, task.index)
        return await self._within(session, lambda: self.environment.rewarded(own, replace(rollout, task=own)))

    async def judge(self, task: RemoteTask, rollout: Rollout) -> Judged:
        own = self._task(task.part, task.index)
        return await self.environment.judged(own, replace(rollout, task=own))

    async def close(self, session: str, failed: str = "") -> None:
        """``failed``: why the episode ended without rewards, which the session is told as an exception."""
        if (episode := self._episodes.pop(session, None)) is not None:
            await episode.end(failed)

    async def close_all(self) -> None:
        for session in list(self._episodes):
            with suppress(Exception):
                await self.close(session, "the environment's process ends")

    async def _prompted(self, task: Task) -> tuple[Message, ...]:
        return tuple(await self.environment.first_messages(task))

    async def _within(self, session: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """In the session's own context; an environment without sessions has none."""
        if not session:
            return await work()
        if (episode := self._episodes.get(session)) is None:
            raise SessionLost(
                f"{self.environment.title} has no session {session}: it was open in a process that is gone, or was closed"
            )
        return await episode.ask(work)

    def _tasks(self, part: int) -> Sequence[Task]:
        if part not in self._parts:
            try:
                self._parts[part] = self.environment.tasks(self.description.sources[part])
            except (DataError, EnvironmentConfigError):
                raise
            except Exception as error:  # whatever an environment from outside does
                where = f"env.{self.description.alias}: {self.environment.title}.tasks"
                raise EnvironmentConfigError(f"{where} raised {type(error).__name__}: {error}") from error
        return self._parts[part]

    def _made(self, part: int, index: int) -> Task:
        return self._tasks(part)[index]

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
    """What a session is told of an episode that failed elsewhere."""


_Work = Callable[[], Coroutine[Any, Any, Any]]


class _Episode:
    """An open session. Its calls run one after another in one asyncio task: what the session sets in a context variable, they see."""

    def __init__(self, environment: Environment[Any], task: Task) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox: asyncio.Queue[tuple[_Work, asyncio.Future[Any]]] = asyncio.Queue()
        self._told: Exception | None = None  # what a caller was told already
        self._runner = asyncio.create_task(self._run(environment, task))

    async def ask(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._runner.done():
            raise SessionLost("the session has ended, since something in it raised")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait((work, answer))
        either: list[asyncio.Future[Any]] = [answer, self._runner]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise SessionLost("the session ended before it answered")
        return answer.result()

    async def end(self, failed: str) -> None:
        """Raises what closing the session raises."""
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
    """The episode is over and all was well."""


# --- here -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """The way to one host. ``blocking`` is for what is asked outside of coroutines: tasks, mostly."""

    call: Call
    blocking: BlockingCall


def connect(description: HostedDescription, links: Sequence[Link]) -> RemoteEnvironment:
    """The environment that the hosts behind ``links`` have, all of the same description. Raises what making it there raised."""
    about: About = _asked_blocking(links[0], "about", ())
    return RemoteEnvironment(description=description, about=about, links=tuple(links))


@dataclass(frozen=True, kw_only=True)
class RemoteEnvironment(Environment[RemoteTask]):
    """An environment whose methods run in other processes. Episodes are dealt out over them; one that has a session stays where it is.

    A call outside of a session is made again where its process died. A session that was open there is lost: SessionLost.
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
                f"env.{self.description.alias}: tasks are asked for from data that its process was not told of ({data})"
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
        found: Judged = await _asked(self._next(), "judge", (task, rollout))
        return found

    def accuracy(self, rollout: Rollout) -> float:
        if self.about.own_accuracy:
            return self._judged_blocking(rollout).accuracy
        return rollout.reward if self.about.accuracy is None else rollout.rewards.get(self.about.accuracy, 0.0)

    def answer_key(self, task: RemoteTask, rollout: Rollout) -> str | None:
        return self._judged_blocking(rollout).answer if self.about.votes else None

    def _judged_blocking(self, rollout: Rollout) -> Judged:
        found: Judged = _asked_blocking(self._next(), "judge", (rollout.task, rollout))
        return found

    def _next(self) -> Link:
        return self.links[next(self._turns) % len(self.links)]

    async def _asked(self, method: Method, *arguments: Any) -> Any:
        """In the session of this context, if one is open."""
        session = _session.get()
        if session is None or session.environment is not self:
            return await _asked(self._next(), method, arguments)
        return await session.asked(method, arguments)


_session: ContextVar[_RemoteSession | None] = ContextVar("strop_remote_session", default=None)


class _RemoteSession(AbstractAsyncContextManager["None"]):
    """A session over there, for as long as this one is open; what is asked in this context meanwhile is asked in it."""

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
                f"the process of the environment {self.environment.title} died while an episode had its session open there ({error}); "
                "what the episode did is lost with it"
            ) from error
        return reply.unwrap()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        _session.reset(self._before)
        failed = "" if error is None else f"{type(error).__name__}: {error}"
        try:
            reply = await self.link.call("close", (self._name, failed))
        except HostDied as gone:
            log.debug("the session %s went with its process: %s", self._name, gone)
        else:
            if error is None:
                reply.unwrap()


async def _asked(link: Link, method: Method, arguments: tuple[Any, ...]) -> Any:
    """The answer of a host; of its replacement where it died. Raises HostDied where that died too."""
    try:
        reply = await link.call(method, arguments)
    except HostDied as error:
        log.warning("%s; %s is asked of the process in its place", error, method)
        reply = await link.call(method, arguments)
    return reply.unwrap()


def _asked_blocking(link: Link, method: Method, arguments: tuple[Any, ...]) -> Any:
    try:
        reply = link.blocking(method, arguments)
    except HostDied as error:
        log.warning("%s; %s is asked of the process in its place", error, method)
        reply = link.blocking(method, arguments)
    return reply.unwrap()


class RemoteTasks(Sequence[RemoteTask]):
    """Tasks by index, fetched in blocks; the blocks used last are kept."""

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
