"""Tools and their calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from strop.types import ToolCall

ToolSchema = Mapping[str, Any]
"""A tool as chat templates and OpenAI's API take it: {"type": "function", "function": {"name", "description", "parameters"}}."""


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of its arguments, an object
    function: Callable[..., Awaitable[str] | str]  # arguments by name -> what the policy reads; a plain one runs in a thread

    @property
    def schema(self) -> ToolSchema:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolError(Exception):
    """A call failed in a way that the policy is told, in these words. The episode goes on."""


class InfrastructureError(RuntimeError):
    """A sandbox, a service or another resource failed that tools and environments work with. The policy is not told, and the rollout has no
    reward; raised while a run starts, it ends the run. The message says what to do."""


class ToolSet(Protocol):
    """Something that has tools for as long as an episode is open: an interpreter, a folder, a server."""

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """Open it for one episode. What the tools share is theirs alone."""
        ...


class ToolConfigError(ValueError):
    """Tools cannot be had as configured. The message says what to set instead."""


@dataclass(frozen=True)
class ParsedReply:
    """A turn of the policy, taken apart."""

    content: str  # what is left without reasoning and calls
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()  # why a call could not be read, in words that the policy can be told

    @property
    def asks_for_tools(self) -> bool:
        return bool(self.calls or self.malformed)


class ToolCallFormat(Protocol):
    """How models of a family write calls."""

    @property
    def name(self) -> str: ...

    @property
    def stop_strings(self) -> Sequence[str]:
        """With which a call ends, if sampling must stop there."""
        ...

    @property
    def inline_result(self) -> str | None:
        """How a result goes on in the same turn, with {result}; None: the format has no such form."""
        ...

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        """Take a turn apart. ``text`` is decoded with special tokens, where the format's markers are such tokens.

        Formats that write every argument as text read numbers and lists by the schemas of ``tools``.
        """
        ...

    def example(self, name: str) -> str:
        """Return a call as the format writes it, to show it where a chat template does not describe tools."""
        ...
