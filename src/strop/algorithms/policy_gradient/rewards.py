"""Rewards of rollouts as an advantage reads them: shaped, by name, minus a KL term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strop.algorithms.functional import logprobs_before_update
from strop.algorithms.group_advantages import indices_by_label
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Shaping
from strop.lazy_torch import Tensor, torch
from strop.types import Batch, Group, Rollout


def shape_rewards(rollouts: Sequence[Rollout], shaping: Shaping | None) -> Tensor:
    """Return the rewards of rollouts, [rollouts] float64."""
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    if shaping is None:
        return rewards
    lengths = torch.tensor([rollout.sampled_tokens for rollout in rollouts], dtype=torch.float64)
    return shaping.shape(rewards, lengths, torch.tensor([rollout.truncated for rollout in rollouts]))


def rewards_by_name(group: Group) -> dict[str, Tensor]:
    """Return each reward of a group's rollouts by name, [G] float64, unweighted; 0 for rollouts without it."""
    names = sorted({name for rollout in group.rollouts for name in rollout.rewards})
    return {
        name: torch.tensor([rollout.rewards.get(name, 0.0) for rollout in group.rollouts], dtype=torch.float64) for name in names
    }


def compared_rewards(group: Group, advantage: Advantage) -> list[Tensor]:
    """Return the rewards that a group's credit is computed from. If none of them varies, the group has no signal."""
    if advantage.needs_named_rewards:
        return list(rewards_by_name(group).values())
    if advantage.needs_step_rewards and any(rollout.step_rewards for rollout in group.rollouts):
        of_steps = torch.tensor([step.reward for rollout in group.rollouts for step in rollout.step_rewards], dtype=torch.float64)
        sums = [sum(step.reward for step in rollout.step_rewards) for rollout in group.rollouts]
        return [group.rewards - torch.tensor(sums, dtype=torch.float64), of_steps]
    baseline = [] if group.baseline is None else [group.baseline.reward]
    return [torch.cat([group.rewards, torch.tensor(baseline, dtype=torch.float64)])]


def subtract_kl(kl: Kl, batch: Batch, advantage: Advantage) -> Batch:
    """Subtract the KL term from the reward or credit of each token or, with ``kl.place`` reward, from that of each rollout."""
    if kl.place == "token_credit":
        estimates = kl.estimate(logprobs_before_update(batch), batch)
        return replace(batch, advantages=(batch.advantages - kl.weight_in(batch) * estimates).float())
    if kl.place == "token_reward":
        return replace(batch, advantages=(batch.advantages - kl.weight_in(batch) * kl.sum_to_go(batch)).float())
    rewards = batch.rewards - kl.weight_in(batch) * kl.sum_per_rollout(batch)
    lengths = torch.bincount(batch.sequence, minlength=batch.num_sequences).double()
    advantages = torch.zeros_like(rewards)
    for members in indices_by_label(batch.group):
        advantages[members] = advantage.rollout_advantages(GroupRewards(rewards=rewards[members], lengths=lengths[members]))
    return replace(batch, rewards=rewards, advantages=advantages.float()[batch.sequence])


def discounted_sums(values: Tensor, decay: Tensor, batch: Batch) -> Tensor:
    """Sum decay^distance x value over each token and the later tokens of its rollout, [N] float64.

    ``decay`` [N] float64, in [0, 1], is the same for all tokens of a rollout. The tokens of a rollout must be contiguous and in order, as
    ``pack`` arranges them. The sums are computed by doubling, over 1, 2, 4, ... tokens, so that ten thousand tokens take fourteen steps.
    """
    sums, factor, span = values, decay, 1
    longest = int(torch.bincount(batch.sequence, minlength=1).max())
    while span < longest:
        same_rollout = batch.sequence[span:] == batch.sequence[:-span]
        later = (factor[:-span] * sums[span:]).where(same_rollout, 0.0)
        sums = torch.cat([sums[:-span] + later, sums[-span:]])
        factor, span = factor.square(), 2 * span
    return sums
