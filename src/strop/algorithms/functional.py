"""Functions that algorithms share. Shapes: [G] rollouts of a group, [N] predicted tokens, [S] rollouts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from strop.lazy_torch import Tensor, torch
from strop.types import Batch, Group

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant_length"]

POLICY_LOGPROBS = "policy_logprobs"  # a batch column, [N]: log-probabilities by the policy before the update
POLICY_SQUARES = "policy_log_sum_sq_probs"  # a batch column, [N]: log of the sum over the vocabulary of p^2, by the same policy
POLICY_COLUMNS = frozenset({POLICY_LOGPROBS, POLICY_SQUARES})  # what the policy itself provides

# Values that differ by less than this share of their magnitude count as equal: sums have rounding errors of that size, and dividing by
# their standard deviation would turn them into full-size advantages.
RELATIVE_ROUNDING = 1e-6  # of float32
ROUNDING_FLOAT64 = 1e-12
EPS = 1e-6  # added to a standard deviation before dividing by it
VARIANCE_EPS = 1e-8  # added to a variance before its root divides
MAX_EXPONENT = 60.0  # nats: float32 overflows at 88, and ratios are still multiplied by advantages and summed
MAX_LOG_RATIO = 1e4  # nats: stands for infinity, if one side gives a sampled token probability 0


def rounding_of(values: Tensor) -> float:
    """Return the share of their magnitude by which values may differ and count as equal.

    Whole numbers are exact. A fraction exactly representable in float32 may be a model's score and have its rounding errors;
    fractions computed by a Python function almost never are.
    """
    if values.dtype != torch.float64:
        return RELATIVE_ROUNDING
    fractions = values[values != values.round()]
    if not len(fractions):
        return 0.0
    return RELATIVE_ROUNDING if bool((fractions == fractions.float().double()).any()) else ROUNDING_FLOAT64


def varies(rewards: Tensor) -> bool:
    """Return whether the rewards [G] of a group differ by more than rounding errors."""
    spread = rewards.max() - rewards.min()
    return bool(spread > rounding_of(rewards) * rewards.abs().max())


def whiten(values: Tensor, mask: Tensor, eps: float = EPS, *, unbiased: bool = False) -> Tensor:
    """Return (value - mean) / (population standard deviation + eps) over the counted tokens of a batch, [N] -> [N] float64.

    The result is zero if the counted values do not vary. ``unbiased`` divides by sqrt(variance with Bessel's correction + 1e-8) instead,
    as the whitening of NeMo-RL, verl and TRL.
    """
    chosen = values[mask > 0]
    counted = chosen.double()
    if not len(counted) or not varies(chosen):
        return torch.zeros_like(values, dtype=torch.float64)
    if unbiased:
        return (values.double() - counted.mean()) / (counted.var() + VARIANCE_EPS).sqrt()
    return (values.double() - counted.mean()) / (counted.std(correction=0) + eps)


def bounded_exp(logs: Tensor) -> Tensor:
    """Return exp(logs), at most e^60, so that a token with probability 0 on one side gives no infinity (or NaN, when multiplied by 0)."""
    return logs.clamp(max=MAX_EXPONENT).exp()


def bounded_difference(logprobs: Tensor, others: Tensor) -> Tensor:
    """Return logprobs - others within +-MAX_LOG_RATIO, with gradient 0 outside: sums and means stay finite if one side is -inf."""
    return (logprobs - others).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def bounded_logprobs(logprobs: Tensor) -> Tensor:
    """Return log-probabilities, at least -MAX_LOG_RATIO, with gradient 0 below, for objectives that multiply them by a weight."""
    return logprobs.clamp(min=-MAX_LOG_RATIO)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None) -> Tensor:
    """Return PPO's objective min(ratio A, clip(ratio, 1 - low, 1 + high) A), [N], which is maximized (arXiv 1707.06347).

    ``high`` > ``low`` is DAPO's clip-higher (2503.14476). ``dual`` c > 1 bounds the objective from below by c A for A < 0
    (dual clip, 1912.09729).
    """
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)
    return objective


def _counted(values: Tensor, batch: Batch) -> Tensor:
    """Return the values of counted tokens, [N]; exactly 0 for the others, also if they are infinite."""
    return torch.where(batch.mask > 0, values, 0.0) * batch.mask.to(values.dtype)


def logprobs_before_update(batch: Batch) -> Tensor:
    """Return the policy's log-probabilities before the update, [N]: the column POLICY_LOGPROBS.

    A run leaves the column out if every batch comes from the policy itself and makes one optimizer step; the sampler's are the same then.
    """
    return batch.columns.get(POLICY_LOGPROBS, batch.rollout_logprobs)


def sequence_sum(values: Tensor, batch: Batch) -> Tensor:
    """Sum over each rollout's counted tokens, [N] -> [S]."""
    return values.new_zeros(batch.num_sequences).index_add(0, batch.sequence, _counted(values, batch))


def sequence_mean(values: Tensor, batch: Batch) -> Tensor:
    """Average over each rollout's counted tokens, [N] -> [S]; 0 for a rollout without counted tokens."""
    return sequence_sum(values, batch) / batch.sequence_lengths.clamp(min=1)


def geometric_mean(log_ratios: Tensor, batch: Batch) -> Tensor:
    """Return exp(mean over each rollout's counted tokens), [N] -> [N], where each entry has the gradient of its own token's log-ratio.

    Summed over a rollout, these gradients are its length times the gradient of the geometric mean (arXiv 2507.18071).
    """
    shared = sequence_mean(log_ratios.detach(), batch)[batch.sequence]
    return bounded_exp(shared + log_ratios - log_ratios.detach())


def aggregate(values: Tensor, batch: Batch, how: Aggregation = "token_mean", constant_length: int | None = None) -> Tensor:
    """Reduce [N] values to a scalar, divided by counts of the whole optimizer step (``batch.totals``) so that micro-batches add up (law 1).

    token_mean: mean over all counted tokens. sequence_mean: mean over rollouts of each rollout's mean. sequence_sum: mean over rollouts of
    each rollout's sum. constant_length: sum over tokens, divided by rollouts x ``constant_length`` (Dr.GRPO).
    """
    counted = _counted(values, batch)
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


def concatenate_per_rollout(method: Callable[[Group], Tensor], groups: Sequence[Group]) -> Tensor:
    """Concatenate the results of an algorithm's method for each group, [S]. Raises ValueError if a length differs."""
    values = [method(group) for group in groups]
    for group, value in zip(groups, values, strict=True):
        if value.shape != (len(group.rollouts),):
            found = f"{method.__qualname__} returned a tensor of shape {tuple(value.shape)} for {len(group.rollouts)} rollouts"
            raise ValueError(f"{found}; return one value for each rollout of the group")
    return torch.cat(values)


# The credit of rollouts relative to their group.

# What a reward is divided by: the deviation of its group as a population, with Bessel's correction, or that of the group's other rewards.
Deviation = Literal["population", "unbiased", "others"]


def group_advantages(
    rewards: Tensor,
    *,
    baseline: bool = True,
    leave_one_out: bool = False,
    normalize: bool = True,
    deviation: Deviation = "population",
    eps: float = EPS,
) -> Tensor:
    """Return (r - baseline) / (standard deviation + eps), [G] -> [G].

    If the group does not vary, the result is exactly zero, or the unchanged rewards without a baseline.

    The baseline is the group's mean (GRPO, arXiv 2402.03300) or, with ``leave_one_out``, the mean of the other rollouts (RLOO,
    2402.14740). ``normalize=False`` is Dr.GRPO (2503.20783). The scale is the deviation of the whole group. With ``deviation`` others it
    is that of the group's other rewards, as in NeMo-RL, which gives a single success too little credit, and the group a net credit that
    is not 0.
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
    if not normalize:
        return centred
    if deviation == "others":
        return centred / _deviation_of_others(rewards, eps)
    return centred / (rewards.std(correction=int(deviation == "unbiased")) + eps)


def _deviation_of_others(rewards: Tensor, eps: float) -> Tensor:
    """Return the unbiased deviation of the other rewards of the group, plus eps, [G] -> [G]; 1 where they are equal, or only one."""
    count = len(rewards)
    others = rewards.expand(count, count)[~torch.eye(count, dtype=torch.bool, device=rewards.device)].view(count, count - 1)
    squares = (others - others.mean(1, keepdim=True)).square().sum(1)
    vary = others.amax(1) - others.amin(1) > rounding_of(others) * others.abs().amax(1)
    return torch.where(vary, (squares / max(count - 2, 1)).sqrt() + eps, 1.0)
