"""Advantages given to turns for their form, regardless of the rollout's reward: a column of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strop.lazy_torch import Tensor, torch
from strop.types import Batch, Group

TURN_ADVANTAGES = "turn_advantages"  # a batch column, [N] float64: replaces a token's advantage; 0 keeps it


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
    """Return the advantages [N], with those given to turns replacing the computed ones."""
    given = batch.columns.get(TURN_ADVANTAGES)
    return advantages if given is None else torch.where(given != 0, given.to(advantages.dtype), advantages)
