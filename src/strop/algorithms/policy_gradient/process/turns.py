"""Turns as columns of a batch: the turn of each token, the reward of each turn, and the state it was taken in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop.algorithms.policy_gradient.process.steps import STEP_REWARDS, sum_of_steps
from strop.lazy_torch import Tensor, torch
from strop.types import Batch, Group

TURNS = "turns"  # a batch column, [N] int64: the turn of each token, numbered over the batch; without it a rollout is one turn
TURN_STATES = "turn_states"  # a batch column, [N] int64: equal for turns of a group taken in the same state; -1: none


def make_turn_columns(batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
    """Return the columns TURNS and TURN_STATES; none if every rollout is a single turn without a state, or is scored as a whole.

    ``batch`` was packed from ``groups``."""
    rollouts = [(index, rollout) for index, group in enumerate(groups) for rollout in group.rollouts]
    if not any(len(rollout.policy_turns) > 1 or rollout.turn_states for _, rollout in rollouts):
        return {}
    known: dict[tuple[int, str], int] = {}
    lengths, states = [], []
    for index, rollout in rollouts:
        turns = rollout.policy_turns
        lengths += [len(turn.tokens) for turn in turns]
        named = rollout.turn_states or (None,) * len(turns)
        states += [-1 if state is None else known.setdefault((index, state), len(known)) for state in named]
    if len(batch.target) == len(rollouts) != sum(lengths):  # one prediction per rollout, at its end
        return {}
    of_token = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return {TURNS: of_token, TURN_STATES: torch.tensor(states)[of_token]}


@dataclass(frozen=True, eq=False)
class BatchTurns:
    """The K turns of a batch, in order."""

    of_token: Tensor  # [N] int64, index into K
    last_token: Tensor  # [K] int64, index into N
    rollout: Tensor  # [K] int64, index into S
    states: Tensor  # [K] int64, as TURN_STATES

    def rewards(self, batch: Batch) -> Tensor:
        """Return the reward of each turn, [K] float64: the rewards of its steps, plus the outcome for the last turn of a rollout."""
        earned = torch.zeros(len(self.rollout), dtype=torch.float64)
        if STEP_REWARDS in batch.columns:
            earned = earned.index_add(0, self.of_token, batch.columns[STEP_REWARDS])
        last = torch.ones(len(self.rollout), dtype=torch.bool)
        last[:-1] = self.rollout[1:] != self.rollout[:-1]
        outcome = batch.rewards.double() - sum_of_steps(batch)
        return earned + torch.where(last, outcome[self.rollout], 0.0)


def find_turns(batch: Batch) -> BatchTurns:
    """Return the turns of a batch. The tokens of a turn, and the turns of a rollout, must be contiguous and in order."""
    _, of_token, counts = batch.columns.get(TURNS, batch.sequence).unique(return_inverse=True, return_counts=True)
    last_token = counts.cumsum(0) - 1
    states = batch.columns.get(TURN_STATES, torch.full_like(batch.sequence, -1))
    return BatchTurns(of_token, last_token, batch.sequence[last_token], states[last_token])


def discount_later_turns(values: Tensor, rollout: Tensor, decay: float) -> Tensor:
    """Return the sum over each turn and the later turns of its rollout of decay^distance x value, [K] -> [K] float64."""
    sums, owner = values.tolist(), rollout.tolist()
    for turn in range(len(sums) - 2, -1, -1):
        if owner[turn] == owner[turn + 1]:
            sums[turn] += decay * sums[turn + 1]
    return torch.tensor(sums, dtype=torch.float64)
