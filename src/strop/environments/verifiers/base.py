"""The interface of verifiers: a verifier is one part of a reward, computed from a reply and its task.

A verifier is a frozen dataclass; its fields are its options. It scores the last turn of a rollout, or each of its turns
(``per_turn``); comparing verifiers score all rollouts of a task together. A new one is a file, named in a configuration as
``file.py:Class``.

Model output is untrusted: a verifier passes it to parsers and patterns only in the scoring pool. Slow code is ``async``, or a
plain method, which runs in a thread. An exception drops the group; a missing verdict is never scored as 0.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar, get_type_hints

from strop.environments.answers import extract_final_answer, extract_last_boxed, extract_last_tagged
from strop.environments.base import EnvironmentConfigError
from strop.thoughts import read_answer
from strop.types import Messages, Rollout, Task, assistant, user
from strop.user_code import explain_invalid, suggest_names

T = TypeVar("T")


def build_from_options(kind: type[T], what: str, options: Mapping[str, Any], *, others: Sequence[str] = ()) -> T:
    """Build a dataclass. Raises EnvironmentConfigError for unknown, ill-typed and missing options of ``what``.

    ``others``: further allowed names that are read elsewhere."""
    from pydantic import TypeAdapter, ValidationError

    known = {item.name: item for item in fields(kind) if item.init}  # type: ignore[arg-type]
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for option, value in options.items():
        if option not in known:
            raise EnvironmentConfigError(f"{what} has no option {option!r}{suggest_names(str(option), (*known, *others))}")
        if types[option] is Any:  # checked by the class itself, and possibly not JSON
            values[option] = value
            continue
        try:  # in JSON mode a list is accepted for a tuple, but "3" is not a number
            values[option] = TypeAdapter(types[option]).validate_json(json.dumps(value), strict=True)
        except (ValidationError, TypeError) as error:
            why = explain_invalid(types[option], value, error)
            raise EnvironmentConfigError(f"the option {option} of {what} is {value!r}: {why}") from error
    for option, item in known.items():
        if option not in values and item.default is MISSING and item.default_factory is MISSING:
            raise EnvironmentConfigError(f"{what} needs the option {option}; set it")
    return kind(**values)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The input of a verifier: a policy turn and the conversation up to its end."""

    text: str
    messages: Messages
    tokens: int = 0  # tokens sampled in the turn; for a whole rollout, in all turns
    opening: str = ""  # opening tag of a thought at the end of the prompt (``Turn.opening``)

    @property
    def content(self) -> str:
        """The text without the thoughts (``strop.thoughts.read_answer``)."""
        return read_answer(self.text, self.opening)

    @property
    def context(self) -> Messages:
        """The messages before the turn."""
        last = max((index for index, each in enumerate(self.messages) if each.role == "assistant"), default=len(self.messages))
        return self.messages[:last]


@dataclass(frozen=True)
class Score:
    """The value of a reply, and further values logged under the reward's name."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)


Scored = float | bool | Score


@dataclass(frozen=True, kw_only=True)
class Verifier(ABC):
    """Base class of verifiers. Subclasses must be ``@dataclass(frozen=True, kw_only=True)`` too."""

    is_accuracy: ClassVar[bool] = False  # whether it judges correctness; evaluation then reports it if it is the only one

    @abstractmethod
    def score(self, task: Task, reply: Reply) -> Scored | Awaitable[Scored]:
        """Return the value of a reply. May be a coroutine; a plain method runs in a thread."""

    @property
    def needs_answer(self) -> bool:
        """Whether data without reference answers is an error."""
        return False

    @property
    def compares(self) -> bool:
        """Whether ``score_group`` is called with all replies to a task instead of ``score`` with each."""
        return False

    async def score_group(self, task: Task, replies: Sequence[Reply]) -> Sequence[Scored]:
        return [await call_score(self, task, reply) for reply in replies]

    def prepare(self) -> None:  # noqa: B027
        """Load what is needed, at the start of a run. Raises EnvironmentConfigError."""

    def check_task(self, task: Task) -> None:  # noqa: B027
        """Raise EnvironmentConfigError for a task that cannot be scored. Called with the first one at the start of a run."""

    def find_answer(self, reply: Reply) -> str | None:
        """Return the final answer in a normal form, for majority votes, or None to abstain."""
        return None


async def call_score(verifier: Verifier, task: Task, reply: Reply) -> Scored:
    """Score a reply without blocking the event loop."""
    if inspect.iscoroutinefunction(verifier.score):
        scored: Scored = await verifier.score(task, reply)
        return scored
    returned = await asyncio.to_thread(verifier.score, task, reply)
    return await returned if inspect.isawaitable(returned) else returned


async def score_turns(verifier: Verifier, task: Task, turns: Sequence[Reply]) -> list[Scored]:
    """Score turns concurrently. Raises the error of the first failing one, in their order."""
    running = [asyncio.create_task(call_score(verifier, task, turn)) for turn in turns]
    try:
        return [await each for each in running]
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def read_reply(rollout: Rollout) -> Reply:
    """Return the last turn of a rollout, with the token count of all its turns."""
    messages = rollout.messages or (user(rollout.task.question), assistant(rollout.text))
    return Reply(text=rollout.text, messages=messages, tokens=rollout.sampled_tokens, opening=rollout.opening)


def read_turns(rollout: Rollout) -> list[Reply]:
    """Return the policy's turns, those of branches after those of the main path, in the order of ``Rollout.policy_turns``."""
    return [*_read_main_path(rollout), *_read_branches(rollout)]


def _read_main_path(rollout: Rollout) -> Iterator[Reply]:
    end = len(rollout.prompt_messages)
    for turn in rollout.turns:
        end += turn.num_messages
        if turn.sampled:
            messages = rollout.messages[:end] or (user(rollout.task.question), assistant(turn.text))
            yield Reply(text=turn.text, messages=messages, tokens=len(turn.tokens), opening=turn.opening)


def _read_branches(rollout: Rollout) -> Iterator[Reply]:
    for branch in rollout.branches:  # branches keep no messages
        for turn in branch.turns:
            if turn.sampled:
                messages = (*rollout.prompt_messages, assistant(turn.text))
                yield Reply(text=turn.text, messages=messages, tokens=len(turn.tokens), opening=turn.opening)


@dataclass(frozen=True, kw_only=True)
class AnswerVerifier(Verifier):
    """A verifier of part of a reply: the text after the thoughts, or the marked answer in it."""

    tag: str | None = None  # read only the content of the last <tag>...</tag>
    extract: Literal["reply", "boxed", "final", "last_line"] = (
        "reply"  # all of it, the last \\boxed, the stated answer, or the last line
    )
    thoughts: bool = False  # also read the text before </think>

    def read(self, reply: Reply) -> str | None:
        """Return the part to verify, None if there is none."""
        text: str | None = reply.text if self.thoughts else reply.content
        if self.tag is not None:
            text = extract_last_tagged(text or "", self.tag)
        if text is None:
            return None
        if self.extract == "boxed":
            return extract_last_boxed(text)
        if self.extract == "final":
            return extract_final_answer(text)
        return (text.strip().splitlines() or [""])[-1] if self.extract == "last_line" else text


def read_path(metadata: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of a row, None if there is none."""
    value: Any = metadata
    for part in path.split("."):
        if isinstance(value, Sequence) and not isinstance(value, str) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            return None
    return value


def read_references(task: Task, key: str | None) -> list[str]:
    """Return the reference answers: the row's column ``key``, one or a list, otherwise the task's own. Raises ValueError if there
    is none.
    """
    value = task.answer if key is None else read_path(task.metadata, key)
    found = [str(each) for each in value] if isinstance(value, list | tuple) else [] if value is None else [str(value)]
    if not found:
        raise ValueError(
            f"the task {task.id!r} has nothing in its column {key!r} to compare with; set references to another column"
        )
    return found


def check_positive(verifier: Verifier, *names: str) -> None:
    """Raise EnvironmentConfigError for an option that is set and not positive."""
    for name in names:
        value = getattr(verifier, name)
        if value is not None and not value > 0:
            raise EnvironmentConfigError(f"{name} is {value}; it must be positive")
