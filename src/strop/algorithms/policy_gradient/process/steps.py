"""Process rewards: step rewards within a rollout, as columns of a batch, and the token credit they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
