"""The arithmetic that algorithms share. Shapes: [G] rollouts of a group, [N] predicted tokens, [S] rollouts of a batch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from strop.types import Batch

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant_length"]
KlEstimator = Literal["k1", "k2", "k3"]

# A group whose rewards differ by less than this share of their size does not vary: sums of float32 rewards leave such residue,
# and dividing by its standard deviation would make full-size advantages out of nothing.
RESIDUE = 1e-6
EPS = 1e-6  # beside a standard deviation that is divided by
LARGEST_EXPONENT = 60.0  # nats: float32 ends at 88, and a ratio is still multiplied by advantages and summed


def varies(rewards: Tensor) -> bool:
    """Whether the rewards [G] of a group differ by more than rounding."""
    spread = rewards.max() - rewards.min()
    return bool(spread > RESIDUE * rewards.abs().max())


def group_advantages(
    rewards: Tensor, *, baseline: bool = True, leave_one_out: bool = False, normalize: bool = True, eps: float = EPS
) -> Tensor:
    """(r - baseline) / (population standard deviation + eps), [G] -> [G]; exactly zero where the group does not vary, or the
    rewards as they are where there is no baseline either: no deviation is there to divide by.

    The baseline is the group's mean (GRPO, arXiv 2402.03300) or, leave-one-out, the mean of the other rollouts (RLOO,
    2402.14740). The scale is always the deviation of the whole group: dividing by a leave-one-out deviation gives a lone
    success less than its due and the group a net negative credit. ``normalize=False`` is Dr.GRPO's choice (2503.20783).
    """
    if not varies(rewards):
        return torch.zeros_like(rewards) if baseline else rewards
    centred = rewards
    if baseline and leave_one_out:
        count = len(rewards)
        if count < 2:
            raise ValueError("a leave-one-out baseline needs at least 2 rollouts a group")
        centred = rewards - (rewards.sum() - rewards) / (count - 1)
    elif baseline:
        centred = rewards - rewards.mean()
    return centred / (rewards.std(correction=0) + eps) if normalize else centred


def whiten(values: Tensor, mask: Tensor, eps: float = EPS) -> Tensor:
    """(value - mean) / (population standard deviation + eps) over the counted tokens of a batch, [N] -> [N] float64.

    Zeros where the counted values do not vary.
    """
    counted = values[mask > 0].double()
    if not len(counted) or not varies(counted):
        return torch.zeros_like(values, dtype=torch.float64)
    return (values.double() - counted.mean()) / (counted.std(correction=0) + eps)


def exponential(logs: Tensor) -> Tensor:
    """exp, at most e^60: a token that one side held for impossible must not become an infinity, and that times 0 a nan."""
    return logs.clamp(max=LARGEST_EXPONENT).exp()


def kl_estimate(
    logprobs: Tensor,
    reference: Tensor,
    estimator: KlEstimator,
    *,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Tensor:
    """Per-token estimates of KL(policy || reference) from tokens the policy sampled (Schulman, 2020), [N].

    With d = log reference - log policy: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. Clamps bound outliers and their gradient.
    """
    difference = reference - logprobs
    if input_clamp is not None:
        difference = difference.clamp(-input_clamp, input_clamp)
    match estimator:
        case "k1":
            estimate = -difference
        case "k2":
            estimate = difference.square() / 2
        case "k3":
            estimate = torch.expm1(difference) - difference
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None) -> Tensor:
    """PPO's objective min(ratio A, clip(ratio, 1 - low, 1 + high) A), [N], to be maximised (arXiv 1707.06347).

    ``high`` > ``low`` is DAPO's clip-higher (2503.14476). ``dual`` c > 1 bounds the objective from below by c A where A < 0
    (dual clip, 1912.09729).
    """
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)
    return objective


def sequence_sum(values: Tensor, batch: Batch) -> Tensor:
    """Sums over each rollout's counted tokens, [N] -> [S]."""
    return values.new_zeros(batch.num_sequences).index_add(0, batch.sequence, values * batch.mask.to(values.dtype))


def sequence_mean(values: Tensor, batch: Batch) -> Tensor:
    """Each rollout's mean over its counted tokens, [N] -> [S]; 0 for a rollout without any."""
    return sequence_sum(values, batch) / batch.sequence_lengths.clamp(min=1)


def geometric_mean(log_ratios: Tensor, batch: Batch) -> Tensor:
    """exp(mean over each rollout's counted tokens), [N] -> [N], where each token's entry has the gradient of its own log-ratio.

    The sum over a rollout of these gradients is its length times the gradient of the mean itself (arXiv 2507.18071).
    """
    shared = sequence_mean(log_ratios.detach(), batch)[batch.sequence]
    return exponential(shared + log_ratios - log_ratios.detach())


def aggregate(values: Tensor, batch: Batch, how: Aggregation = "token_mean", constant_length: int | None = None) -> Tensor:
    """Sum [N] values into a scalar over the counts of the whole optimizer step (``batch.totals``), so that parts add up (law 1).

    token_mean: mean over all counted tokens. sequence_mean: mean over rollouts of their means. sequence_sum: mean over rollouts
    of their sums. constant_length: sums over rollouts x ``constant_length`` (Dr.GRPO).
    """
    counted = values * batch.mask
    match how:
        case "token_mean":
            return counted.sum() / max(batch.totals.tokens, 1)
        case "sequence_mean":
            return sequence_mean(values, batch).sum() / max(batch.totals.sequences, 1)
        case "sequence_sum":
            return counted.sum() / max(batch.totals.sequences, 1)
        case "constant_length":
            if not constant_length:
                raise ValueError("aggregation constant_length needs a positive constant_length")
            return counted.sum() / (max(batch.totals.sequences, 1) * constant_length)
