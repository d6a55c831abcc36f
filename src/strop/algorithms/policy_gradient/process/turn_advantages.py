"""Advantages that are given to turns whatever their rollout earned, for how they are written: a column of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strop.lazy_torch import Tensor, torch
from strop.types import Batch, Group

TURN_ADVANTAGES = "turn_advantages"  # a batch column, [N] float64: what replaces a token's advantage; 0 where nothing does


def make_turn_advantages(batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
    """Return the column TURN_ADVANTAGES; none if no turn has one. ``batch`` was packed from ``groups``."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not any(any(rollout.turn_advantages) for rollout in rollouts):
        return {}
    lengths: list[int] = []
    given: list[float] = []
    for rollout in rollouts:
        turns = rollout.policy_turns
        lengths += [len(turn.tokens) for turn in turns]
        given += rollout.turn_advantages or (0.0,) * len(turns)
    return {TURN_ADVANTAGES: torch.tensor(given, dtype=torch.float64).repeat_interleave(torch.tensor(lengths))}


def replace_advantages(advantages: Tensor, batch: Batch) -> Tensor:
    """Return the advantages [N] with those that turns are given in their place."""
    given = batch.columns.get(TURN_ADVANTAGES)
    return advantages if given is None else torch.where(given != 0, given.to(advantages.dtype), advantages)
