"""The tokens of a prompt, its rollouts and their branches as a tree of segments, each read once by the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from strop.types import Rollout, Turn

Span = tuple[int, int]
"""A range of consecutive numbers: the first one, and how many."""


@dataclass
class FlatTokens:
    """The tokens of a batch under construction, in segments."""

    tokens: list[Tensor] = field(default_factory=list)
    positions: list[Span] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    length: int = 0

    def add_segment(self, tokens: Tensor, parent: int, position: int) -> int:
        self.starts.append(self.length)
        self.parents.append(parent)
        self.tokens.append(tokens)
        self.positions.append((position, tokens.numel()))
        self.length += tokens.numel()
        return len(self.starts) - 1


@dataclass(eq=False)
class TokenPath:
    """A prompt, a rollout or a branch: its own tokens after ``start`` tokens of ``parent``, cut into segments where other paths
    branch off.
    """

    tokens: Tensor  # all of its own tokens
    read: int  # number of them that the network reads
    parent: TokenPath | None = None
    start: int = 0
    cuts: set[int] = field(default_factory=set)  # among its own tokens
    segments: list[tuple[int, int, int]] = field(default_factory=list)  # first position, segment, index of its first token in T

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.parent._cut(self.start)

    def _cut(self, position: int) -> None:
        if position <= self.start and self.parent is not None:
            self.parent._cut(position)
        elif position > self.start:
            self.cuts.add(position - self.start)
            self.read = max(self.read, position - self.start)

    def append_to(self, flat: FlatTokens) -> None:
        """Append its segments. Those of its parent must already be there, and all paths branching off it must be known."""
        bounds = [0, *sorted(self.cuts - {self.read}), self.read] if self.cuts else [0, self.read]
        parent = -1 if self.parent is None else self.parent._segment_before(self.start)
        for first, last in pairwise(bounds):
            offset = flat.length
            parent = flat.add_segment(self.tokens[first:last], parent, self.start + first)
            self.segments.append((self.start + first, parent, offset))

    @property
    def leaf(self) -> int:
        return self.segments[-1][1]

    def _segment_before(self, position: int) -> int:
        """Return the segment ending at a position where the path is cut; -1 at its beginning."""
        if position <= self.start:
            return -1 if self.parent is None else self.parent._segment_before(position)
        return next(segment for first, segment, _ in reversed(self.segments) if first < position)

    def spans(self, first: int, last: int) -> list[Span]:
        """Return where in T the tokens at positions ``first`` to ``last`` - 1 are, including those of its parents."""
        found: list[Span] = []
        if self.parent is not None and first < self.start:
            found, first = self.parent.spans(first, min(last, self.start)), self.start
        for place, (begin, _, offset) in enumerate(self.segments):
            end = self.segments[place + 1][0] if place + 1 < len(self.segments) else last
            low, high = max(first, begin), min(last, end)
            if low < high:
                found.append((offset + low - begin, high - low))
        return found


def expand(spans: Sequence[Span]) -> Tensor:
    """Return all numbers of some ranges, one range after the other."""
    firsts, counts = torch.tensor(spans, dtype=torch.int64).view(-1, 2).unbind(1)
    ends = counts.cumsum(0)
    total = int(ends[-1]) if spans else 0
    return (firsts - ends + counts).repeat_interleave(counts, output_size=total).add_(torch.arange(total))


def make_paths(rollout: Rollout, root: TokenPath | None, *, share: bool, at_end: bool) -> list[TokenPath]:
    """Return the main path of a rollout and its branches; with ``at_end``, only the main path up to its last sampled token."""
    prompt, (tokens, end) = rollout.prompt, own_tokens(rollout.turns)
    read, length = end if at_end else max(end - 1, 0), prompt.numel()
    main = TokenPath(torch.cat([prompt, tokens]), length + read) if root is None else TokenPath(tokens, read, root, length)
    branches = () if at_end else rollout.branches
    paths, rows = [main], [rollout.tokens()] if branches else []
    for branch in branches:
        tokens, end = own_tokens(branch.turns)
        context = rows[branch.parent][: branch.start]
        rows.append(torch.cat([context, tokens]))
        read = max(end - 1, 0)
        flat = TokenPath(rows[-1], len(context) + read)
        paths.append(TokenPath(tokens, read, paths[branch.parent], branch.start) if share else flat)
    return paths


def own_tokens(turns: Sequence[Turn]) -> tuple[Tensor, int]:
    """Return the tokens of some turns, and their number up to the last sampled one."""
    end = length = 0
    for turn in turns:
        length += turn.tokens.numel()
        end = length if turn.sampled and turn.tokens.numel() else end
    return concatenate([turn.tokens for turn in turns], torch.int64), end


def concatenate(columns: Sequence[Tensor], dtype: torch.dtype) -> Tensor:  # [L]
    if len(columns) == 1:
        return columns[0]
    return torch.cat(list(columns)) if columns else torch.zeros(0, dtype=dtype)
