"""Why rollouts end: one table of causes, each with who can cause it, and how code reports a failure's cause.

What the policy can cause is scored and trained on. What it cannot cause is left out of the baseline and the loss, alone. An exception
of code that reports no cause drops the group (``docs/environments.md#failures``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum


class Who(StrEnum):
    """Who can cause a rollout to end."""

    POLICY = "policy"
    TASK = "task"
    CODE = "code"  # of an environment or a reward: its exception may be a bug, or follow from what the policy wrote
    INFRASTRUCTURE = "infrastructure"


class Ending(StrEnum):
    """Why a rollout ended: the name in metrics and stored rollouts, who can cause it, and what happened."""

    who: Who
    meaning: str

    def __new__(cls, name: str, who: Who = Who.CODE, meaning: str = "") -> Ending:
        member = str.__new__(cls, name)
        member._value_, member.who, member.meaning = name, who, meaning
        return member

    STOP = "stop", Who.POLICY, "the policy stopped, and the environment had nothing to add"
    LENGTH = "length", Who.POLICY, "a turn reached the maximum number of new tokens"
    CONTEXT = "context", Who.POLICY, "the conversation no longer fits the maximum sequence length"
    TURNS = "turns", Who.POLICY, "the maximum number of turns was reached"
    TOOL_CALLS = "tool_calls", Who.POLICY, "the maximum number of tool calls was reached"
    BUDGET = "budget", Who.POLICY, "the episode used up its budget of tokens or cost"
    TIME = "time", Who.POLICY, "the time limit of the episode was reached: the agent, or what it started, hangs or is slow"
    CRASH = "crash", Who.POLICY, "the agent, or a program that the policy wrote or drives, crashed"
    BROKEN_TASK = "broken_task", Who.TASK, "the task cannot be sampled or scored: its prompt is too long, or its data are broken"
    ERROR = "error", Who.CODE, "the code of the environment or of a reward raised an exception that reports no cause"
    ENGINE = "engine", Who.INFRASTRUCTURE, "an engine failed to answer a request"
    ENVIRONMENT = "environment", Who.INFRASTRUCTURE, "a process of the environment or of its agent did not start, or died"
    SANDBOX = "sandbox", Who.INFRASTRUCTURE, "a sandbox did not start, was full or vanished"
    TOOL_SERVER = "tool_server", Who.INFRASTRUCTURE, "a server of tools did not start, or was lost"
    GRADER = "grader", Who.INFRASTRUCTURE, "the process that scores answers failed, for any answer"
    PROVIDER_LIMIT = "provider_limit", Who.INFRASTRUCTURE, "a provider refused requests because of its rate limit or quota"
    ABORTED = "aborted", Who.INFRASTRUCTURE, "it was cancelled, because its group could no longer be trained on"
    SERVICE = "service", Who.INFRASTRUCTURE, "another service or resource, or the network to it, failed"

    @property
    def is_failure(self) -> bool:
        """Whether something failed. An episode that ran into a limit of tokens, turns, calls or cost is complete."""
        return self not in (Ending.STOP, Ending.LENGTH, Ending.CONTEXT, Ending.TURNS, Ending.TOOL_CALLS, Ending.BUDGET)


class RolloutFailed(RuntimeError):
    """A rollout cannot go on, and ``ending`` is why. Environments, tools, agents and rewards raise it."""

    ending: Ending | None = None

    def __init__(self, message: str = "", ending: Ending | str | None = None) -> None:
        super().__init__(message)
        if ending is not None:
            self.ending = Ending(ending)


def find_ending(error: BaseException | None) -> Ending | None:
    """Return the attribute ``ending`` of an exception, or of the exceptions that it was raised from; None if none has one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(found := getattr(error, "ending", None), Ending):
            return found
        error = error.__cause__
    return None


@contextmanager
def failing_as(ending: Ending, *, unless: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Mark exceptions raised in the block as failures of this kind, if they report no cause themselves."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, unless) and find_ending(error) is None:
            with suppress(AttributeError):
                error.ending = ending  # type: ignore[attr-defined]
        raise
