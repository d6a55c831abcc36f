"""Tools and their calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from strop.endings import Ending, RolloutFailed
from strop.types import ToolCall

ToolSchema = Mapping[str, Any]
"""A tool in the form of chat templates and OpenAI's API: {"type": "function", "function": {"name", "description", "parameters"}}."""


@dataclass(frozen=True)
class Tool:
    """A function available to a policy."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of its arguments, an object
    function: Callable[..., Awaitable[str] | str]  # arguments by name -> result for the policy; a plain function runs in a thread

    @property
    def schema(self) -> ToolSchema:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolError(Exception):
    """A call failed; the message is shown to the policy. The episode goes on."""


class InfrastructureError(RolloutFailed):
    """A sandbox, a service or another resource failed that tools and environments work with. The policy is not told, and the rollout has no
    reward; raised while a run starts, it ends the run. The message says what to do."""

    ending = Ending.SERVICE


class ToolSet(Protocol):
    """A resource that provides tools while an episode is open: an interpreter, a folder, a server."""

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """Open it for one episode. State shared by its tools is private to the episode."""
        ...


class ToolConfigError(ValueError):
    """Tools cannot be provided as configured. The message says what to set instead."""


@dataclass(frozen=True)
class ParsedReply:
    """A parsed policy turn."""

    content: str  # the text without reasoning and calls
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()  # why calls could not be read, in words for the policy

    @property
    def asks_for_tools(self) -> bool:
        return bool(self.calls or self.malformed)


class ToolCallFormat(Protocol):
    """The call syntax of a model family."""

    @property
    def name(self) -> str: ...

    @property
    def stop_strings(self) -> Sequence[str]:
        """Strings that end a call, if sampling must stop there."""
        ...

    @property
    def inline_result(self) -> str | None:
        """Template of a result that continues the same turn, with {result}; None: not supported by the format."""
        ...

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        """Parse a turn. ``text`` is decoded with special tokens if the format's markers are such tokens.

        Formats that write every argument as text parse numbers and lists by the schemas of ``tools``.
        """
        ...

    def example(self, name: str) -> str:
        """Return a call in this format, to show it if a chat template does not describe tools."""
        ...
