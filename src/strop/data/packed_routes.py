"""The experts that engines chose for the tokens of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strop.data.token_tree import TokenPath
from strop.types import NO_ROUTE, Rollout


def place_routes(rollouts: Sequence[Rollout], trees: Sequence[Sequence[TokenPath]], length: int) -> Tensor | None:
    """Return the recorded experts of the tokens that are read, [T, layers, k]; None if nothing was recorded.

    Of a token that several turns read, they are those of the first turn: it sampled with them, and later ones mostly found its keys and
    values in a cache.
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
        for path, (end, turns) in zip(paths, starts, strict=False):  # without branches where only an end is predicted
            for turn in turns:
                end += len(turn.tokens)
                if turn.routes is None:
                    continue
                places = path.find_between(end - 1 - len(turn.routes), end - 1)
                fresh = (turn.routes >= 0).flatten(1).any(1) & ~placed[places]
                routes[places[fresh]] = turn.routes[fresh].to(dtype)
                placed[places[fresh]] = True
    return routes
