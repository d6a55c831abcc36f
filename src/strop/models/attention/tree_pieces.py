"""The pieces of attention over a tree: rectangles of a row's queries and keys, derived from its segments.

A segment attends causally to itself, and all its descendants attend to all of it. In a batch, the descendants of a segment are
contiguous, so each segment has two pieces regardless of the number of completions: a causal square, and one long rectangle
without a mask. With a sliding window the rectangle is cut by segment, to the tokens within the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Levels = tuple[tuple["AttentionPiece", ...], ...]
"""Pieces whose queries do not overlap within a level; the first level has the causal squares."""


@dataclass(frozen=True)
class AttentionPiece:
    """Queries [query, query + queries) of a row and the keys [key, key + keys) that they attend to."""

    query: int
    queries: int
    key: int
    keys: int
    distance: int | None = None  # position of the first query minus that of the first key; None: each query sees each key

    @property
    def causal(self) -> bool:
        """Whether it is a square in which each query sees the keys up to its own position."""
        return self.distance == 0 and self.queries == self.keys

    def narrow(self, window: int | None) -> AttentionPiece | None:
        """Return the piece without a distance if every query sees every key, and None if no query sees any."""
        if self.queries <= 0 or self.keys <= 0:
            return None
        if self.distance is None:
            return self
        nearest, farthest = self.distance - self.keys + 1, self.distance + self.queries - 1
        if farthest < 0 or (window is not None and nearest >= window):
            return None
        if nearest >= 0 and (window is None or farthest < window):
            return AttentionPiece(self.query, self.queries, self.key, self.keys)
        return self

    def clip(self, queries: tuple[int, int], keys: tuple[int, int], window: int | None) -> AttentionPiece | None:
        """Return the part of it in two ranges [first, last), counted from their starts. None if it is empty."""
        query, key = max(self.query, queries[0]), max(self.key, keys[0])
        last_query, last_key = min(self.query + self.queries, queries[1]), min(self.key + self.keys, keys[1])
        distance = None if self.distance is None else self.distance + (query - self.query) - (key - self.key)
        return AttentionPiece(query - queries[0], last_query - query, key - keys[0], last_key - key, distance).narrow(window)

    def blocks(self, queries: int, keys: int, window: int | None) -> Iterator[AttentionPiece]:
        """Cut it into blocks of at most this many queries and keys; blocks without visible keys are left out."""
        for row in range(0, self.queries, queries):
            for column in range(0, self.keys, keys):
                distance = None if self.distance is None else self.distance + row - column
                size = (min(queries, self.queries - row), min(keys, self.keys - column))
                block = AttentionPiece(self.query + row, size[0], self.key + column, size[1], distance).narrow(window)
                if block is not None:
                    yield block


@dataclass(frozen=True, eq=False)
class TreeSegments:
    """A row's segments, in any order. A segment's ancestors precede it in position, but not necessarily in the row."""

    starts: Sequence[int]
    lengths: Sequence[int]
    parents: Sequence[int]  # -1: a root

    @property
    def children(self) -> list[list[int]]:
        """The children of each segment, and the roots at the end."""
        children: list[list[int]] = [[] for _ in range(len(self.starts) + 1)]
        for segment, parent in enumerate(self.parents):
            children[parent].append(segment)
        return children

    def walk(self) -> Iterator[tuple[int, int, int]]:
        """Yield (segment, depth, position of its first token), each segment before its descendants."""
        children = self.children
        waiting = [(segment, 0, 0) for segment in reversed(children[-1])]
        while waiting:
            segment, depth, position = waiting.pop()
            yield segment, depth, position
            below = (depth + 1, position + self.lengths[segment])
            waiting += [(child, *below) for child in reversed(children[segment])]

    def levels(self, window: int | None = None) -> Levels:
        """Return the pieces of the row: the causal squares, then attention to the roots, to their children, and so on."""
        children = self.children
        levels: list[list[AttentionPiece]] = [[]]
        for segment, depth, _ in self.walk():
            start, length = self.starts[segment], self.lengths[segment]
            if not length:
                continue
            levels[0].append(AttentionPiece(start, length, start, length, 0))
            pieces = self._below(segment, children) if window is None else self._within(segment, children, window)
            levels += [[] for _ in range(depth + 2 - len(levels))]
            levels[depth + 1] += pieces
        return tuple(tuple(level) for level in levels if level)

    def paths(self, window: int | None = None) -> Levels:
        """Return one level in which the pieces of a segment's queries follow each other: its ancestors' keys from the root down, within
        the window of its first query, and its causal square. The first query's window is that of the whole sequence, so a kernel
        that takes them as one has to apply it.
        """
        found: list[AttentionPiece] = []
        above: dict[int, list[tuple[int, int]]] = {
            -1: []
        }  # by segment: the ranges of keys on its path that are within the window
        for segment, _, _ in self.walk():
            start, length = self.starts[segment], self.lengths[segment]
            keys = above[self.parents[segment]]
            if length:
                found += [AttentionPiece(start, length, key, count) for key, count in keys]
                found.append(AttentionPiece(start, length, start, length, 0))
            above[segment] = _last([*keys, (start, length)], window)
        return (tuple(found),)

    def _below(self, segment: int, children: list[list[int]]) -> Iterable[AttentionPiece]:
        """The descendants of a segment attend to all of it: one piece per contiguous range of the row."""
        waiting, found = list(children[segment]), []
        while waiting:
            below = waiting.pop()
            waiting += children[below]
            if self.lengths[below]:
                found.append((self.starts[below], self.starts[below] + self.lengths[below]))
        for first, last in join_ranges(found):
            yield AttentionPiece(first, last - first, self.starts[segment], self.lengths[segment])

    def _within(self, segment: int, children: list[list[int]], window: int) -> Iterable[AttentionPiece]:
        """The same within a window: one piece per segment that reaches back far enough."""
        start, length = self.starts[segment], self.lengths[segment]
        waiting = [(below, length) for below in children[segment]]
        while waiting:
            below, distance = waiting.pop()
            unseen = max(0, distance - window + 1)  # keys before the first query's window
            if unseen >= length:
                continue
            queries = min(self.lengths[below], window + length - 1 - distance)
            piece = AttentionPiece(self.starts[below], queries, start + unseen, length - unseen, distance - unseen).narrow(window)
            if piece is not None:
                yield piece
            waiting += [(child, distance + self.lengths[below]) for child in children[below]]


def _last(ranges: list[tuple[int, int]], window: int | None) -> list[tuple[int, int]]:
    """Return the last tokens of consecutive ranges (first, count) that are within a window of the token after them."""
    left, kept = sum(count for _, count in ranges) if window is None else window - 1, []
    for first, count in reversed(ranges):
        if (taken := min(count, left)) > 0:
            kept.append((first + count - taken, taken))
            left -= taken
    return kept[::-1]


def join_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join disjoint ranges [first, last) where one begins at the end of another."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined
