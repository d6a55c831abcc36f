"""One answered request of an agent."""

from __future__ import annotations

from dataclasses import dataclass

from strop.types import Message, Turn


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """What an agent asked, as tokens and messages, and what the policy sampled."""

    number: int  # of the request in its episode
    context: tuple[int, ...]  # the tokens that the policy read
    turn: Turn
    messages: tuple[Message, ...] = ()  # of a chat, with the reply
    text: str = ""  # of a completion: prompt and reply
    added_text: str = ""  # of the messages that the policy had not read before

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.context, *self.turn.tokens.tolist())
