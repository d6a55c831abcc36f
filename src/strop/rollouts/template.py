"""Messages -> tokens, through the tokenizer's chat template. The only place where text becomes tokens (law 2).

What the policy sampled is never tokenised again: an observation is tokenised alone, as the piece of the template that stands between
the end of the policy's turn and the start of its next one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from strop.types import Message, Messages

# A reply whose text no template changes and no conversation contains; the rendering around it is what surrounds any reply.
_REPLY = "\u241e\u2418\u241e"


class ChatTemplate:
    """Renders prompts and observations as token ids."""

    def __init__(self, tokenizer: Any, *, options: Mapping[str, Any] | None = None) -> None:
        """``options`` go to the template, such as ``enable_thinking``. A tokenizer without a template joins plain text, with a warning."""
        self.tokenizer = tokenizer
        self.options = dict(options or {})
        self.plain = not getattr(tokenizer, "chat_template", None)
        if self.plain:
            warnings.warn(
                "the tokenizer has no chat template: messages are joined as plain text; set policy.tokenizer.chat_template to change that",
                stacklevel=2,
            )

    def prompt(self, messages: Messages) -> list[int]:
        """The conversation so far and the start of the policy's turn. Raises ValueError for an empty one."""
        if not messages:
            raise ValueError("a prompt needs at least one message; the environment gave none")
        if self.plain:
            ids: list[int] = self.tokenizer(_joined(messages))["input_ids"]
            return ids
        return self._encode(self._render(messages, open_turn=True))

    def observation(self, messages: Messages, sampled: Sequence[int]) -> list[int]:
        """What to append after the policy's turn ``sampled``: the end of that turn, unless it was sampled, the messages, a new turn."""
        if self.plain:
            return self._encode("\n" + _joined(messages) + "\n")
        before = [Message("user", "?"), Message("assistant", _REPLY)]
        rendered = self._render([*before, *messages], open_turn=True)
        _, found, rest = rendered.partition(_REPLY)
        if not found:
            raise ValueError(
                "the chat template does not render an assistant's message as it is written; a conversation cannot go on in tokens"
            )
        ids = self._encode(rest)
        return ids[1:] if sampled and ids and ids[0] == sampled[-1] else ids

    def _render(self, messages: Messages, *, open_turn: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [message.as_dict() for message in messages], add_generation_prompt=open_turn, tokenize=False, **self.options
        )
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _joined(messages: Messages) -> str:
    return "\n".join(message.content for message in messages)
