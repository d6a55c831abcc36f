"""What a packed batch says, against the rollouts that it was packed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from strop.models.routing.router_config import ROUTES
from strop.types import Batch, Group, Rollout, Turn
from support.rollouts import sampled_turn


def history(batch: Batch, predicted: int) -> list[int]:
    """The tokens that the network has read when it predicts token ``predicted``, by the batch's own structure."""
    source = int(batch.source[predicted])
    segment = int((batch.segment_start <= source).nonzero().max())
    while int(batch.segment_length[segment]) == 0:
        segment -= 1  # empty segments share their start with the next one
    start = int(batch.segment_start[segment])
    tokens = batch.tokens[start : source + 1].tolist()
    segment = int(batch.segment_parent[segment])
    while segment != -1:
        start = int(batch.segment_start[segment])
        tokens = batch.tokens[start : start + int(batch.segment_length[segment])].tolist() + tokens
        segment = int(batch.segment_parent[segment])
    return tokens


def expected(groups: Sequence[Group]) -> list[tuple[list[int], int, int, float]]:
    """(history, target, place of the rollout, sampler log-probability) of every sampled token, straight from the rollouts."""
    found = []
    for place, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        for context, tokens, turns in path_rows(rollout):
            position = context
            for turn in turns:
                for offset, logprob in enumerate(turn.logprobs.tolist()):
                    if turn.sampled:
                        found.append((tokens[: position + offset], tokens[position + offset], place, logprob))
                position += len(turn.tokens)
    return found


def path_rows(rollout: Rollout) -> list[tuple[int, list[int], tuple[Turn, ...]]]:
    """(length of its context, all its tokens, its own turns) of the main path and of each branch."""
    rows = [(len(rollout.prompt), rollout.tokens().tolist(), rollout.turns)]
    for branch in rollout.branches:
        own = [token for turn in branch.turns for token in turn.tokens.tolist()]
        rows.append((branch.start, rows[branch.parent][1][: branch.start] + own, branch.turns))
    return rows


def described(batch: Batch) -> list[tuple[list[int], int, int, float]]:
    return [
        (history(batch, place), int(batch.target[place]), int(batch.sequence[place]), float(batch.rollout_logprobs[place]))
        for place in range(len(batch.target))
    ]


def routes_of(tokens: Sequence[int], experts: int = 8) -> Tensor:
    """[n, 2, 2]: experts that a token has by what is before it, as a model chooses them."""
    sums = torch.tensor(list(tokens)).cumsum(0)
    first = torch.stack([sums % experts, sums // 3 % experts], 1)
    return torch.stack([first, (first + 1) % experts], -1).to(torch.int8)


def routed_turn(context: Sequence[int], tokens: Sequence[int]) -> Turn:
    """A turn with the experts of everything that the engine read for it."""
    return replace(sampled_turn(tokens), columns={ROUTES: routes_of([*context, *tokens][:-1])})


def check_routes(batch: Batch) -> None:
    """Every predicted token's source has the experts of its history."""
    for place, source in enumerate(batch.source.tolist()):
        assert torch.equal(batch.read_columns["routes"][source], routes_of(history(batch, place))[-1]), place
