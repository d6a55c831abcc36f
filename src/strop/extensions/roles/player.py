"""The interface of players, which an episode with several roles is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from strop.types import Message

POLICY, OWN = "policy", "own"  # bindings of trained roles


class Player(Protocol):
    """A role of an episode, played by a policy or another model."""

    async def say(self, *messages: Message, stop_strings: Sequence[str] = ()) -> str:
        """Continue the conversation with these messages. Returns the role's answer to them, without its thoughts."""
        ...

    def begin(self) -> None:
        """Begin another conversation, that remembers nothing of the one before."""
        ...


class Stage(Protocol):
    """Makes the players of an episode."""

    def enter(self, role: str, binding: Any) -> Player: ...
