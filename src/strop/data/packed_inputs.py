"""What a packed batch consists of: a tree of segments, each read once by the network, its images, and the columns of turns and rollouts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from strop.columns import TokenColumn
from strop.types import PromptImage, Rollout, Turn

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


def same_images(left: Rollout, right: Rollout) -> bool:
    """Return whether two prompts have the same images, since equal tokens may stand for different ones."""
    return left.images is right.images or [each.digest for each in left.images] == [each.digest for each in right.images]


def place_images(
    rollouts: Sequence[Rollout], trees: Sequence[Sequence[TokenPath]], segment_starts: Sequence[int]
) -> tuple[PromptImage, ...]:
    """Return the images of the tokens that are read, each once, ascending, with their positions in T.

    Raises ValueError for a branch that starts within an image.
    """
    placed: dict[int, PromptImage] = {}
    for rollout, paths in zip(rollouts, trees, strict=True):
        turns = (rollout.turns, *(branch.turns for branch in rollout.branches))
        if not rollout.images and not any(turn.images for each in turns for turn in each):
            continue
        own = [tuple(image for turn in each for image in turn.images) for each in turns]
        for number, (path, images) in enumerate(zip(paths, own, strict=False)):  # without branches if only the end is predicted
            for image in (*rollout.images, *images) if number == 0 else _inherited(rollout, number, images):
                if image.start >= path.start + path.read:
                    continue  # after the last sampled token; nothing is predicted from it
                spans = path.spans(image.start, image.end)
                start, last = spans[0][0], sum(spans[-1]) - 1
                if bisect_right(segment_starts, start) != bisect_right(segment_starts, last):
                    raise ValueError(
                        f"a branch of task {rollout.task.id} leaves its path within an image: end what they share before the image"
                    )
                if placed.setdefault(start, image.moved(start - image.start)).digest != image.digest:
                    raise ValueError(
                        f"two paths of task {rollout.task.id} share tokens that stand for different images: end what they share before them"
                    )
    return tuple(placed[start] for start in sorted(placed))


def _inherited(rollout: Rollout, number: int, images: Sequence[PromptImage]) -> tuple[PromptImage, ...]:
    """Return all images on the path of a branch: those of its context, then its own."""
    branch = rollout.branches[number - 1]
    above: tuple[PromptImage, ...]
    if branch.parent == 0:
        above = rollout.path_images
    else:
        parent = rollout.branches[branch.parent - 1]
        above = _inherited(rollout, branch.parent, [image for turn in parent.turns for image in turn.images])
    return (*(image for image in above if image.start < branch.start), *images)


def pack_columns(
    rollouts: Sequence[Rollout], trees: Sequence[Sequence[TokenPath]], length: int, *, at_end: bool
) -> dict[str, Any]:
    """Return the fields of a batch of T = ``length`` tokens that hold its columns. ``trees``: the paths of each rollout.

    Where only an end is predicted, ``at_end``, there are none of predicted tokens. Raises ValueError for values of different shapes.
    """
    of_turns = _declared(
        turn.columns for rollout in rollouts for turn in rollout.policy_turns if turn.columns and turn.tokens.numel()
    )
    of_tokens = [] if at_end else [column for column in of_turns if column.aligned in ("predicted", "turn")]
    return {
        "columns": {column.name: _join_tokens(column, rollouts) for column in of_tokens},
        "read_columns": {
            column.name: _place_read(column, rollouts, trees, length) for column in of_turns if column.aligned == "read"
        },
        "rollout_columns": {
            column.name: _join(column, [(rollout.columns.get(column), 1) for rollout in rollouts])
            for column in _declared(rollout.columns for rollout in rollouts)
        },
    }


def _declared(found: Iterable[Iterable[TokenColumn]]) -> list[TokenColumn]:
    """Return each column once. Raises ValueError for different columns of one name."""
    columns = list(dict.fromkeys(column for columns in found for column in columns))
    if len({column.name for column in columns}) < len(columns):
        raise ValueError(f"two of the columns of this batch have one name: {columns}; give one of them another")
    return columns


def _join_tokens(column: TokenColumn, rollouts: Sequence[Rollout]) -> Tensor:  # [N, ...]
    turns = [turn for rollout in rollouts for turn in rollout.policy_turns if len(turn.tokens)]
    found, lengths = [turn.columns.get(column) for turn in turns], [len(turn.tokens) for turn in turns]
    recorded = [values for values in found if values is not None]
    if column.complete and 0 < len(recorded) < len(turns):
        raise ValueError(
            f"only {len(recorded)} of the {len(turns)} turns of this batch recorded {column.name!r}: they were sampled under different "
            f"options. Resume with the {column.key} of the run's beginning"
        )
    if column.ragged and recorded:
        widest = max(values.shape[1] for values in recorded)
        found = [None if values is None else pad(values, (0, widest - values.shape[1]), value=column.fill) for values in found]
    of_tokens = column.aligned == "predicted"
    joined = _join(column, list(zip(found, lengths if of_tokens else [1] * len(turns), strict=True)))
    if column.check is not None:
        column.check(joined, torch.cat([turn.tokens for turn in turns]))
    return joined if of_tokens else joined.repeat_interleave(torch.tensor(lengths), 0)


def _join(column: TokenColumn, parts: Sequence[tuple[Tensor | None, int]]) -> Tensor:
    """Join the values of parts, each with its length; those that were not recorded are filled."""
    shape, dtype = _find_form(column, [values for values, _ in parts if values is not None])
    for values, length in parts:
        if values is not None and len(values) != length:
            raise ValueError(f"the column {column.name!r} ({column.aligned}) has {len(values)} entries where there are {length}")
    missing = torch.full((max(length for _, length in parts), *shape), column.fill, dtype=dtype)
    return torch.cat([missing[:length] if values is None else values.to(dtype) for values, length in parts])


def _find_form(column: TokenColumn, found: Sequence[Tensor]) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape of one entry, and the type that holds all. Raises ValueError."""
    shapes = {tuple(values.shape[1:]) for values in found}
    if len(shapes) > 1:
        raise ValueError(
            f"the column {column.name!r} of this batch was recorded for models of different shapes, with entries of {sorted(shapes)}; "
            "train on rollouts of one model and its settings"
        )
    return shapes.pop(), reduce(torch.promote_types, (values.dtype for values in found))


def _widen(column: TokenColumn, values: Tensor, width: int) -> Tensor:
    return pad(values, (0, width - values.shape[-1]), value=column.fill) if column.bits else values


def _place_read(
    column: TokenColumn, rollouts: Sequence[Rollout], trees: Sequence[Sequence[TokenPath]], length: int
) -> Tensor:  # [T, ...]
    """Place what was recorded of the tokens that are read.

    Of a token that several turns read, the value of the first turn counts: it sampled with it, and later ones mostly found its keys and
    values in a cache.
    """
    turns = [turn for rollout in rollouts for turn in rollout.policy_turns]
    recorded = [turn.columns[column] for turn in turns if column in turn.columns]
    widest = max(values.shape[-1] for values in recorded) if column.bits else 0
    shape, dtype = _find_form(column, [_widen(column, values, widest) for values in recorded])
    joined = torch.full((length, *shape), column.fill, dtype=dtype)
    placed = torch.zeros(length, dtype=torch.bool)
    for rollout, paths in zip(rollouts, trees, strict=True):
        starts = [(len(rollout.prompt), rollout.turns), *((branch.start, branch.turns) for branch in rollout.branches)]
        for path, (end, turns_of) in zip(paths, starts, strict=False):  # without branches if only the end is predicted
            for turn in turns_of:
                end += len(turn.tokens)
                values = turn.columns.get(column)
                if values is None:
                    continue
                places = expand(path.spans(end - 1 - len(values), end - 1))
                fresh = column.find_known(values) & ~placed[places]
                joined[places[fresh]] = _widen(column, values[fresh], widest).to(dtype)
                placed[places[fresh]] = True
    return joined
