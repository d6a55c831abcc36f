"""Splits the policy's output into its reasoning and its answer, as text and as token ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from strop.thoughts import Thought, find_thoughts


@dataclass(frozen=True)
class ReasoningPart:
    """Consecutive characters of a turn. Its tags are not part of the text, but of the tokens."""

    text: str
    is_reasoning: bool
    is_closed: bool = True  # False: reasoning that never ended
    start: int | None = None  # tokens [start, end) of the rollout; None if the texts of tokens are unknown
    end: int | None = None
    origin: str = ""  # for reasoning outside of the turn's text: its origin


def split_reasoning_parts(
    text: str, *, is_inside: bool = False, pieces: Sequence[str] | None = None, first: int = 0
) -> tuple[ReasoningPart, ...]:
    """Return the parts of a turn in order; none if it has no reasoning.

    ``is_inside``: its prompt opened the reasoning. ``pieces``: the texts of its tokens, of which the first is token ``first`` of the
    rollout. If the tags are tokens missing from ``text``, the texts of the parts are those of their tokens.
    """
    spans = find_thoughts(text, is_inside=is_inside)
    if pieces is None:
        return tuple(_cut(text, spans))
    joined = "".join(pieces)
    spans_of_tokens = find_thoughts(joined, is_inside=is_inside)
    if not spans_of_tokens:
        return ()
    texts = _cut(text, spans) if len(spans) == len(spans_of_tokens) else _cut(joined, spans_of_tokens)
    said = _cut(joined, spans_of_tokens)
    if [part.is_reasoning for part in texts] != [part.is_reasoning for part in said]:  # the text ends before the tokens do
        texts = said
    ends = list(accumulate(map(len, pieces)))
    places = (first + _token_at(ends, place, is_end) for place, is_end in _list_edges(joined, spans_of_tokens))
    edges = [*accumulate(places, max, initial=first), first + len(pieces)]
    return tuple(
        ReasoningPart(part.text, part.is_reasoning, part.is_closed, start, end)
        for part, start, end in zip(texts, edges, edges[1:], strict=False)
    )


def _cut(text: str, spans: Sequence[Thought]) -> list[ReasoningPart]:
    """Return the reasoning and the text before, between and after; nothing without reasoning. White space before it is left out."""
    parts: list[ReasoningPart] = []
    at = 0
    for span in spans:
        if text[at : span.start].strip() or (parts and span.start > at):
            parts.append(ReasoningPart(text[at : span.start].strip("\n"), False))
        parts.append(ReasoningPart(text[span.inner : span.inner_end].strip("\n"), True, span.is_closed))
        at = span.end
    if spans and at < len(text):
        parts.append(ReasoningPart(text[at:].strip("\n"), False))
    return parts


def _list_edges(text: str, spans: Sequence[Thought]) -> list[tuple[int, bool]]:
    """Return the boundaries between parts: character positions, and whether the token there belongs to the part before."""
    edges: list[tuple[int, bool]] = []
    at = 0
    for span in spans:
        if text[at : span.start].strip() or (edges and span.start > at):
            edges.append((span.start, False))
        if span.end < len(text):
            edges.append((span.end, True))
        at = span.end
    return edges


def _token_at(ends: Sequence[int], place: int, is_end: bool) -> int:
    """Return the token containing character ``place``; for an end, the first token after it."""
    return bisect_left(ends, place) + 1 if is_end else bisect_right(ends, place)
