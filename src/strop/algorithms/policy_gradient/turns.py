"""What a batch holds about the steps and turns of rollouts, as columns, and sums over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop.algorithms.functional import EPS, varies
from strop.lazy_torch import Tensor, torch
from strop.types import Batch, Group

STEP_REWARDS = "step_rewards"  # a batch column, [N] float64: the reward of the step that ends at a token; 0 elsewhere
STEP_ENDS = "step_ends"  # a batch column, [N] float64: 1 where a step ends


def make_step_columns(batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
    """Return the columns STEP_REWARDS and STEP_ENDS; none if no rollout has step rewards. ``batch`` was packed from ``groups``."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not any(rollout.step_rewards for rollout in rollouts):
        return {}
    rewards, ends = torch.zeros(2, len(batch.target), dtype=torch.float64)
    start = 0
    for rollout in rollouts:
        for step in rollout.step_rewards if rollout.sampled_tokens else ():
            rewards[start + step.token] = step.reward
            ends[start + step.token] = 1
        start += rollout.sampled_tokens
    return {STEP_REWARDS: rewards, STEP_ENDS: ends}


def sum_of_steps(batch: Batch) -> Tensor:
    """Return the sum of each rollout's step rewards, [S] float64: the part of its reward that is not the outcome."""
    sums = torch.zeros(batch.num_sequences, dtype=torch.float64)
    return sums.index_add(0, batch.sequence, batch.columns[STEP_REWARDS]) if STEP_REWARDS in batch.columns else sums


def sum_to_go(values: Tensor, batch: Batch) -> Tensor:
    """Sum over each token and the later tokens of its rollout, [N] -> [N]. The tokens of a rollout must be contiguous and in order."""
    total = values.new_zeros(batch.num_sequences).index_add(0, batch.sequence, values)
    running = values.cumsum(0)
    before = (total.cumsum(0) - total)[batch.sequence]  # total of the rollouts before this one
    return total[batch.sequence] - (running - values - before)


def relative_steps(rewards: Tensor, rollout: Tensor, *, leave_one_out: bool, normalize: bool) -> Tensor:
    """Return the step rewards of a group minus their baseline, [K] -> [K]. ``rollout`` [K] is the rollout of each step.

    The baseline is the mean over all steps of the group, and with ``leave_one_out`` the mean over the other rollouts of the mean of
    their steps. ``normalize`` divides by the population deviation over all steps. Rewards that do not vary give exactly 0.
    """
    if not len(rewards) or not varies(rewards):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if leave_one_out:
        _, own_index, counts = rollout.unique(return_inverse=True, return_counts=True)
        by_rollout = rewards[own_index.argsort(stable=True)].split(counts.tolist())
        means = torch.stack([steps.mean() for steps in by_rollout])
        own = means[own_index]
        centred = rewards - (means.sum() - own) / (len(means) - 1) if len(means) > 1 else torch.zeros_like(rewards)
    return centred / (rewards.std(correction=0) + EPS) if normalize else centred


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


def indices_by_label(label: Tensor) -> list[Tensor]:
    """Return, for each label in order, the indices that have it, ascending; the label -1 is left out."""
    order = label.argsort(stable=True)
    order = order[label[order] >= 0]
    _, counts = label[order].unique_consecutive(return_counts=True)
    return list(order.split(counts.tolist()))


# Advantages given to turns for their form, regardless of the rollout's reward: a column of a batch.

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
