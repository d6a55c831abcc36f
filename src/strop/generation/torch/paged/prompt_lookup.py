"""Drafts of the next tokens, looked up in what a sequence holds already (prompt-lookup decoding, Saxena 2023; n-grams in vLLM).

A draft is a guess. The engine draws the token at each of its positions as it would without the draft, and keeps the draft as far as the
draws agree: the same as accepting a drafted token d with probability p(d) and otherwise drawing from p without d, so the distribution
is that of the model, and the tokens are those that the same seed gives without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_NGRAM = 4  # tokens
SHORTEST_NGRAM = 2


class PromptLookup:
    """Finds where the last tokens of a sequence occurred before, and proposes what followed."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> index after its last occurrence that something follows

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Propose up to ``count`` tokens that may follow. ``tokens`` begin with those of the previous call."""
        for token in tokens[len(self._tokens) :]:
            self._index_last()
            self._tokens.append(token)
        for size in range(LONGEST_NGRAM, SHORTEST_NGRAM - 1, -1):
            end = self._ends.get(tuple(self._tokens[-size:])) if len(self._tokens) >= size else None
            if end is not None:
                return self._tokens[end : end + count]
        return []

    def _index_last(self) -> None:
        """Index the n-grams that end with the last token, before another one follows."""
        for size in range(SHORTEST_NGRAM, LONGEST_NGRAM + 1):
            if len(self._tokens) >= size:
                self._ends[tuple(self._tokens[-size:])] = len(self._tokens)
