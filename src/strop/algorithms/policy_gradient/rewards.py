"""Rewards of rollouts as an advantage reads them: shaped, by name, minus a KL term."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from strop import metrics
from strop.algorithms.functional import bounded_exp, logprobs_before_update, sequence_mean
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Shaping
from strop.algorithms.policy_gradient.turns import indices_by_label
from strop.lazy_torch import Tensor, torch
from strop.metrics import Metrics
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


# Rollouts on which sampler and learner disagree leave the loss (NeMo-RL's ``seq_logprob_error_threshold``).
#
# The error of a rollout is the mean of exp|log pi_o - log mu| over its counted tokens: 1 where the two agree, and the same measure
# as ``train/token_mult_prob_error``. The sign of a difference does not matter, unlike in ``sequence_mask_tis`` and the rejections,
# and an excluded rollout also does not count in the denominators of the loss or in its KL term.

PREFIX = "sequence_error/"  # prefix of logged columns; each holds one number for the whole optimizer step


def mask_sequence_errors(batch: Batch, learner_logprobs: Tensor, threshold: float) -> Batch:
    """Return the batch of an optimizer step without the rollouts whose error is above ``threshold``, with new totals.

    ``learner_logprobs`` [N] are those of the learner before the update.
    """
    difference = torch.where(batch.mask > 0, (learner_logprobs.detach() - batch.rollout_logprobs).double(), 0.0)
    errors = sequence_mean(bounded_exp(difference.abs()), batch)
    counted = batch.sequence_lengths > 0
    kept = ~(errors > threshold)
    masked = counted & ~kept
    columns = {
        "masked": masked.sum() / counted.sum().clamp(min=1),
        "masked_rewarded": (batch.rewards[masked] > 0).double().sum() / masked.sum().clamp(min=1),
        "mean": errors[counted].mean() if counted.any() else torch.zeros(()),
        "max": errors[counted].max() if counted.any() else torch.zeros(()),
    }
    batch = replace(batch, mask=batch.mask * kept[batch.sequence].to(batch.mask.dtype)).with_totals()
    return batch.with_columns({PREFIX + name: value.float().expand(len(batch.target)) for name, value in columns.items()})


def check_threshold(threshold: float | None) -> Iterator[str]:
    """Yield why no rollout can have an error of at most ``threshold``."""
    if threshold is not None and threshold < 1:
        yield (
            f"seq_logprob_error_threshold is {threshold}, but the error is 1 where sampler and learner agree, so no rollout would be left; "
            "set it above 1, for instance to 2, or to null"
        )


def logged_errors(batch: Batch) -> Metrics:
    """Return the metrics of ``mask_sequence_errors``, even if no rollout is left."""
    found = {name: column[0] for name, column in batch.columns.items() if name.startswith(PREFIX) and len(column)}
    return {
        name.replace("/", "_"): metrics.maximum(value) if name == f"{PREFIX}max" else metrics.mean(value, batch.num_sequences)
        for name, value in found.items()
    }
