"""What a packed batch holds besides tokens: the images that it reads, and the columns of turns and rollouts (``strop.columns``)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from strop.columns import TokenColumn
from strop.data.token_tree import TokenPath, expand
from strop.types import PromptImage, Rollout


def same_images(left: Rollout, right: Rollout) -> bool:
    """Return whether two prompts have the same images, since equal tokens may stand for different ones."""
    return [image.digest for image in left.images] == [image.digest for image in right.images]


def place_images(
    rollouts: Sequence[Rollout], trees: Sequence[Sequence[TokenPath]], segment_starts: Sequence[int]
) -> tuple[PromptImage, ...]:
    """Return the images of the tokens that are read, each once, ascending, with their positions in T.

    Raises ValueError for a branch that starts within an image.
    """
    placed: dict[int, PromptImage] = {}
    for rollout, paths in zip(rollouts, trees, strict=True):
        turns = (rollout.turns, *(branch.turns for branch in rollout.branches))
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
    of_turns = _declared(turn.columns for rollout in rollouts for turn in rollout.policy_turns if len(turn.tokens))
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
