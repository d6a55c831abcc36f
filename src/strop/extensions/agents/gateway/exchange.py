"""One answered request of an agent."""

from __future__ import annotations

from dataclasses import dataclass

from strop.types import Message, Turn


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """An agent's request, as tokens and messages, and the policy's completion."""

    number: int  # of the request in its episode
    context: tuple[int, ...]  # tokens read by the policy
    turn: Turn
    messages: tuple[Message, ...] = ()  # of a chat, with the reply
    text: str = ""  # of a completion: prompt and reply
    added_text: str = ""  # of the messages that were new to the policy

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.context, *self.turn.tokens.tolist())
