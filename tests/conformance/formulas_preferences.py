"""Supervised fine-tuning, preference losses, KTO and reward models, to be minimised.

A pair is (chosen, rejected). log-ratio of a completion: sum over t of log pi - log pi_ref.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from conformance.formulas_common import (
    Row,
    Scalar,
    constant,
    counted,
    log_sigmoid,
    mean,
    sequence_mean,
    sigmoid,
    softplus,
    token_mean,
)

Pair = tuple[Row, Row]


def total(row: Row) -> Scalar:
    """log pi(y|x)."""
    return sum(row.now)


def log_ratio(row: Row) -> Scalar:
    """log pi(y|x) - log pi_ref(y|x)."""
    return sum(row.now[t] - row.reference[t] for t in row.tokens)


def mean_log_ratio(row: Row) -> Scalar:
    return log_ratio(row) / max(row.length, 1)


def delta(pair: Pair) -> Scalar:
    chosen, rejected = pair
    return log_ratio(chosen) - log_ratio(rejected)


# Supervised


def nll(rows: Sequence[Row], *, per_sequence: bool = False) -> Scalar:
    """-log p of the taught tokens."""
    reduce = sequence_mean if per_sequence else token_mean
    return reduce(rows, lambda row: [-now for now in row.now])


def dft(rows: Sequence[Row]) -> Scalar:
    """Dynamic fine-tuning: -sg(p) log p (2508.05629)."""
    return token_mean(rows, lambda row: [-math.exp(constant(now)) * now for now in row.now])


# Pairs: one loss each


def dpo(pair: Pair, *, beta: float) -> Scalar:
    """-log sigmoid(beta Delta) (2305.18290, eq. 7)."""
    return -log_sigmoid(beta * delta(pair))


def dpo_averaged(pair: Pair, *, beta: float) -> Scalar:
    """DPO on means over tokens instead of sums."""
    return -log_sigmoid(beta * (mean_log_ratio(pair[0]) - mean_log_ratio(pair[1])))


def cdpo(pair: Pair, *, beta: float, smoothing: float) -> Scalar:
    """-(1 - e) log sigmoid(beta Delta) - e log sigmoid(-beta Delta) (ericmitchell.ai/cdpo.pdf)."""
    x = beta * delta(pair)
    return -(1 - smoothing) * log_sigmoid(x) - smoothing * log_sigmoid(-x)


def robust_dpo(pair: Pair, *, beta: float, smoothing: float) -> Scalar:
    """(-(1 - e) log sigmoid(beta Delta) + e log sigmoid(-beta Delta)) / (1 - 2 e) (2403.00409)."""
    x = beta * delta(pair)
    return (-(1 - smoothing) * log_sigmoid(x) + smoothing * log_sigmoid(-x)) / (1 - 2 * smoothing)


def ipo(pair: Pair, *, beta: float) -> Scalar:
    """(Delta - 1 / (2 beta))^2 (2310.12036), Delta of sums."""
    return (delta(pair) - 1 / (2 * beta)) ** 2


def ipo_averaged(pair: Pair, *, beta: float) -> Scalar:
    """IPO with each log-ratio divided by its completion's length."""
    return (mean_log_ratio(pair[0]) - mean_log_ratio(pair[1]) - 1 / (2 * beta)) ** 2


def simpo(pair: Pair, *, beta: float, gamma: float) -> Scalar:
    """-log sigmoid(beta/|y_w| log pi(y_w) - beta/|y_l| log pi(y_l) - gamma) (2405.14734, eq. 6)."""
    chosen, rejected = pair
    return -log_sigmoid(beta * total(chosen) / chosen.length - beta * total(rejected) / rejected.length - gamma)


def log_odds(row: Row) -> Scalar:
    """log(P / (1 - P)), log P the mean log-probability of the completion's tokens (2403.07691)."""
    average = total(row) / row.length
    return average - torch.log(-torch.expm1(average))


def orpo(pair: Pair, *, weight: float) -> Scalar:
    """-mean log p(chosen) + lambda x -log sigmoid(log odds(y_w) - log odds(y_l)) (2403.07691, eq. 6 and 7)."""
    chosen, rejected = pair
    return -total(chosen) / chosen.length - weight * log_sigmoid(log_odds(chosen) - log_odds(rejected))


def apo_zero(pair: Pair, *, beta: float) -> Scalar:
    """-sigmoid(r_w) + sigmoid(r_l), r = beta x log-ratio (2408.06266). The constant 1 makes it a sum of two errors."""
    chosen, rejected = (beta * log_ratio(row) for row in pair)
    return (1 - sigmoid(chosen)) + sigmoid(rejected)


def apo_down(pair: Pair, *, beta: float) -> Scalar:
    """sigmoid(r_w) - sigmoid(r_w - r_l) (2408.06266), with the constant 1."""
    chosen, rejected = (beta * log_ratio(row) for row in pair)
    return sigmoid(chosen) + (1 - sigmoid(chosen - rejected))


def hinge(pair: Pair, *, beta: float) -> Scalar:
    """max(0, 1 - beta Delta): SLiC's calibration loss (2305.10425) on log-ratios."""
    return max(1 - beta * delta(pair), 0.0 * delta(pair))


def over_pairs(pairs: Sequence[Pair], loss: object, **options: float) -> Scalar:
    """The mean over pairs."""
    return mean([loss(pair, **options) for pair in pairs])  # type: ignore[operator]


# Unpaired


def kto(judged: Sequence[Row], mismatched: Sequence[Row], *, beta: float, desirable: float, undesirable: float) -> Scalar:
    """lambda_y - v(x, y); v = lambda_D sigmoid(beta (r - z0)) for desirable, lambda_U sigmoid(beta (z0 - r)) for undesirable ones;
    z0 = max(0, mean of the log-ratios of completions shown to other prompts), without a gradient (2402.01306).
    """
    z0 = max(0.0, constant(mean([log_ratio(row) for row in mismatched])))
    losses = []
    for row in judged:
        r = log_ratio(row)
        good = row.reward > 0.5
        losses.append(desirable * (1 - sigmoid(beta * (r - z0))) if good else undesirable * (1 - sigmoid(beta * (z0 - r))))
    return mean(losses)


# Reward models


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: float = 0.0, centering: float = 0.0) -> Scalar:
    """-log sigmoid(r_c - r_r - m) (2307.09288, eq. 2) + c (r_c + r_r)^2 (2312.09244)."""
    return softplus(-(chosen - rejected - margin)) + centering * (chosen + rejected) ** 2


def sft_on_chosen(pairs: Sequence[Pair], *, averaged: bool = True) -> Scalar:
    """The NLL of the chosen completions: over all their tokens, or the mean over pairs of sums."""
    chosen = [pair[0] for pair in pairs]
    if averaged:
        return nll(chosen)
    return mean([-total(row) for row in counted(chosen)])
