"""Tools and their calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from strop.types import ToolCall


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of its arguments, an object
    function: Callable[..., Awaitable[str] | str]  # arguments by name -> what the policy reads

    @property
    def schema(self) -> Mapping[str, Any]:
        """What chat templates and OpenAI's API take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolError(Exception):
    """A call failed in a way that the policy is told, in these words. The episode goes on."""


class ToolSet(Protocol):
    """Something that has tools for as long as an episode is open: an interpreter, a folder, a server."""

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """Open it for one episode. What the tools share is theirs alone."""
        ...


@dataclass(frozen=True)
class ParsedReply:
    """A turn of the policy, taken apart."""

    content: str  # what is left without reasoning and calls
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()  # why a call could not be read, in words that the policy can be told


class ToolCallFormat(Protocol):
    """How models of a family write calls."""

    name: str
    stop_strings: Sequence[str]  # with which a call ends, if sampling must stop there

    def parse(self, text: str) -> ParsedReply:
        """Take a turn apart. ``text`` is decoded with special tokens, where the format's markers are such tokens."""
        ...
