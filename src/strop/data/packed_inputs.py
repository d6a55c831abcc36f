"""Further inputs of a packed batch: its images, and the experts that engines chose for its tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from strop.data.token_tree import TokenPath
from strop.types import NO_ROUTE, PromptImage, Rollout


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
                start, last = path.find_between(image.start, image.end)[[0, -1]].tolist()
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


def place_routes(rollouts: Sequence[Rollout], trees: Sequence[Sequence[TokenPath]], length: int) -> Tensor | None:
    """Return the recorded experts of the tokens that are read, [T, layers, k]; None if nothing was recorded.

    For a token read by several turns, they come from the first turn: it sampled with them, and later turns mostly found its keys
    and values cached.
    """
    recorded = [turn.routes for rollout in rollouts for turn in rollout.policy_turns if turn.routes is not None]
    if not recorded:
        return None
    if len(shapes := {routes.shape[1:] for routes in recorded}) > 1:
        raise ValueError(f"the experts of this batch were recorded for models of different shapes: {sorted(map(tuple, shapes))}")
    dtype = max((routes.dtype for routes in recorded), key=lambda each: each.itemsize)
    routes = torch.full((length, *recorded[0].shape[1:]), NO_ROUTE, dtype=dtype)
    placed = torch.zeros(length, dtype=torch.bool)
    for rollout, paths in zip(rollouts, trees, strict=True):
        starts = [(len(rollout.prompt), rollout.turns), *((branch.start, branch.turns) for branch in rollout.branches)]
        for path, (end, turns) in zip(paths, starts, strict=False):  # without branches if only the end is predicted
            for turn in turns:
                end += len(turn.tokens)
                if turn.routes is None:
                    continue
                places = path.find_between(end - 1 - len(turn.routes), end - 1)
                fresh = (turn.routes >= 0).flatten(1).any(1) & ~placed[places]
                routes[places[fresh]] = turn.routes[fresh].to(dtype)
                placed[places[fresh]] = True
    return routes
