"""Recorded experts in a packed batch: each token that is read has those of the turn that read it first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strop.data.packing import pack
from strop.data.splitting import select_rollouts, split_micro_batches
from strop.models.routing.router_config import NO_ROUTE, ROUTES
from strop.types import Group, Rollout, observation_turn
from support.packed import check_routes, routed_turn
from support.rollouts import make_agent_groups, make_group, make_rollout


def with_routes(group: Group) -> Group:
    """The group, as if an engine had sampled every policy turn of every path."""

    def recorded(rollout: Rollout) -> Rollout:
        rows = [(rollout.prompt.tolist(), rollout.turns)]
        rows += [([], branch.turns) for branch in rollout.branches]
        full: list[list[int]] = []
        paths = []
        for place, (context, turns) in enumerate(rows):
            tokens = context if place == 0 else full[rollout.branches[place - 1].parent][: rollout.branches[place - 1].start]
            found = []
            for turn in turns:
                found.append(replace(turn, columns=routed_turn(tokens, turn.tokens.tolist()).columns) if turn.sampled else turn)
                tokens = [*tokens, *turn.tokens.tolist()]
            full.append(tokens)
            paths.append(tuple(found))
        branches = tuple(replace(branch, turns=turns) for branch, turns in zip(rollout.branches, paths[1:], strict=True))
        return replace(rollout, turns=paths[0], branches=branches)

    return replace(group, rollouts=tuple(map(recorded, group.rollouts)))


@pytest.mark.parametrize("share", [True, False])
def test_every_token_read_has_its_experts(share: bool) -> None:
    """Shared prompts, several turns, and branches that leave prompts and turns anywhere."""
    batch = pack(list(map(with_routes, make_agent_groups())), share_prefixes=share)
    check_routes(batch)
    routes = batch.read_columns["routes"]
    assert bool((routes >= 0).all()) and routes.dtype == torch.int8
    check_routes(select_rollouts(batch, [0, 2]).batch)
    for part in split_micro_batches(batch, 12):
        check_routes(part.batch)


def test_turns_keep_only_the_experts_that_earlier_ones_lack() -> None:
    rollout = make_rollout([5, 6, 7])
    for answer, observed in (((8, 9), (10, 11)), ((12, 13, 14), ())):
        rollout = rollout.with_turn(routed_turn(rollout.tokens().tolist(), answer))
        rollout = rollout.with_turn(observation_turn(observed, "")) if observed else rollout
    first, second = rollout.policy_turns
    lengths = len(first.columns[ROUTES]), len(second.columns[ROUTES])
    assert lengths == (3 + 1, 1 + 2 + 2)  # the last of the first turn, the observation, its own
    check_routes(pack([make_group(rollout)]))


def test_tokens_that_nobody_recorded_have_no_route() -> None:
    (group,) = map(with_routes, make_agent_groups())
    plain = make_agent_groups()[0].rollouts[1]
    batch = pack([make_group(group.rollouts[2], plain), make_group(plain, index=1)])
    routes = batch.read_columns["routes"]
    known = routes[:, 0, 0] >= 0
    lengths = batch.segment_length.tolist()
    assert known.split(lengths)[0].all() and known.split(lengths)[1].all(), "the shared prompt and the recorded completion"
    assert not torch.cat(known.split(lengths)[2:]).any()
    assert bool((routes[~known] == NO_ROUTE).all())
    assert not pack([make_group(plain)]).read_columns


def test_experts_of_different_models_do_not_go_together() -> None:
    (group,) = map(with_routes, make_agent_groups())
    turn = group.rollouts[2].turns[0]
    other = replace(group.rollouts[2], turns=(replace(turn, columns={ROUTES: turn.columns[ROUTES][:, :1]}),))
    with pytest.raises(ValueError, match="recorded for models of different shapes"):
        pack([make_group(group.rollouts[2], other)])
