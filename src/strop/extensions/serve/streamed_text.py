"""The text of a completion while its tokens are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # decoded from an incomplete character


class StreamedText:
    """Turns tokens into text that can be sent at once: complete characters that cannot begin a stop string."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        self._context = self._read = (
            0  # tokens before ``_read`` are in ``_text``; those from ``_context`` on affect the decoding of later ones
        )
        self._text = ""
        self._sent = 0

    def push(self, token: int) -> str:
        """Add a token. Return the text that can be sent now, which may be empty."""
        self._tokens.append(token)
        before, after = self._decode(self._tokens[self._context : self._read]), self._decode(self._tokens[self._context :])
        if len(after) > len(before) and not after.endswith(_INCOMPLETE):
            self._text += after[len(before) :]
            self._context, self._read = self._read, len(self._tokens)
        return self._send(len(self._text) - self._count_held())

    def finish(self) -> str:
        """Return the text held back so far."""
        self._text += self._decode(self._tokens[self._context :])[len(self._decode(self._tokens[self._context : self._read])) :]
        return self._send(len(self._text))

    def _send(self, end: int) -> str:
        end = min(end, len(cut_at_stop(self._text, self._stop)))
        part = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return part

    def _count_held(self) -> int:
        """Return the length of the longest suffix of the text that begins a stop string."""
        lengths = (length for stop in self._stop for length in range(1, len(stop)) if self._text.endswith(stop[:length]))
        return max(lengths, default=0)

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]
