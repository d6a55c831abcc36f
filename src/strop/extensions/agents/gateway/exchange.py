"""One answered request of an agent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strop.types import Message, PromptImage, Turn


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """An agent's request, as tokens, and the policy's completion.

    A request that continues an earlier one has only its new tokens, so an episode of hundreds of turns takes memory in proportion to its
    length and not to its square.
    """

    number: int  # of the request in its episode
    turn: Turn
    parent: Exchange | None = None  # whose context and turn are the beginning of the context
    added: tuple[int, ...]  # tokens of the context after those of the parent
    images: tuple[PromptImage, ...] = ()  # among the added tokens; positions count from the beginning of the context
    num_messages: int = 0  # of a chat, with the reply
    reply: Message | None = None  # of a chat
    added_text: str = ""  # of the messages that were new to the policy

    def _chain(self) -> Iterator[Exchange]:
        """Yield this exchange and those that it continues, the first one last."""
        each: Exchange | None = self
        while each is not None:
            yield each
            each = each.parent

    @property
    def context(self) -> list[int]:
        """The tokens that the policy read."""
        return [*(() if self.parent is None else self.parent.tokens), *self.added]

    @property
    def tokens(self) -> list[int]:
        """The tokens that the policy read, and those that it sampled."""
        found: list[int] = []
        for each in reversed(list(self._chain())):
            found += each.added
            found += each.turn.tokens.tolist()
        return found

    @property
    def context_images(self) -> tuple[PromptImage, ...]:
        return tuple(image for each in reversed(list(self._chain())) for image in each.images)
