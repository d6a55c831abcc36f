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


# Scores of other divergences, and what lies beyond the shorter completion


def score(row: Row, *, divergence: str = "reverse_kl", a: float = 0.5) -> Scalar:
    """f'(t) of t = pi / pi_ref (2309.16240, table 1)."""
    h = log_ratio(row)
    if divergence == "forward_kl":
        return 1 - torch.exp(-h) if isinstance(h, Tensor) else 0.0
    if divergence == "js_divergence":
        return math.log(2) + log_sigmoid(h)
    if divergence == "alpha_divergence" and a != 1:
        return (torch.exp((a - 1) * h) - 1) / (a - 1) if isinstance(h, Tensor) else 0.0
    return h


def dpo_of_divergence(pair: Pair, *, beta: float, divergence: str, a: float = 0.5, averaged: bool = False) -> Scalar:
    """-log sigmoid(beta (f'(t_w) - f'(t_l))); averaged: each divided by its completion's length, as TRL's sigmoid_norm."""
    chosen, rejected = (score(row, divergence=divergence, a=a) / (max(row.length, 1) if averaged else 1) for row in pair)
    return -log_sigmoid(beta * (chosen - rejected))


def desensitised(row: Row, other: Row, *, alpha: float) -> Scalar:
    """The log-ratio with weight alpha on tokens beyond the length of the other completion (2409.06411, eq. 9)."""
    shared = min(row.length, other.length)
    return sum((1.0 if t < shared else alpha) * (row.now[t] - row.reference[t]) for t in row.tokens)


def ld_dpo(pair: Pair, *, beta: float, alpha: float) -> Scalar:
    chosen, rejected = pair
    return -log_sigmoid(beta * (desensitised(chosen, rejected, alpha=alpha) - desensitised(rejected, chosen, alpha=alpha)))


def exo(pair: Pair, *, beta: float, smoothing: float) -> Scalar:
    """sum over y of p(y) log(p(y) / q(y)) with p = sigmoid(+-beta Delta) and q = (1 - e, e) (2402.00856, eq. 16)."""
    x = beta * delta(pair)
    return sigmoid(x) * (log_sigmoid(x) - math.log(1 - smoothing)) + sigmoid(-x) * (log_sigmoid(-x) - math.log(smoothing))


def nca(pair: Pair, *, beta: float) -> Scalar:
    """-log sigmoid(r_w) - (log sigmoid(-r_w) + log sigmoid(-r_l)) / 2 (2402.05369, eq. 14 with K = 2)."""
    chosen, rejected = (beta * log_ratio(row) for row in pair)
    return -log_sigmoid(chosen) - (log_sigmoid(-chosen) + log_sigmoid(-rejected)) / 2


def bco(pair: Pair, *, beta: float) -> Scalar:
    """-log sigmoid(r_w) - log sigmoid(-r_l) (2404.04656, eq. 9 without the shift)."""
    chosen, rejected = (beta * log_ratio(row) for row in pair)
    return -log_sigmoid(chosen) - log_sigmoid(-rejected)


def sppo(pair: Pair, *, beta: float) -> Scalar:
    """(log-ratio_w - 1 / (2 beta))^2 + (log-ratio_l + 1 / (2 beta))^2 (2405.00675, eq. 4.7)."""
    chosen, rejected = (log_ratio(row) for row in pair)
    return (chosen - 1 / (2 * beta)) ** 2 + (rejected + 1 / (2 * beta)) ** 2


def discopop(pair: Pair, *, beta: float, tau: float = 0.05) -> Scalar:
    """(1 - sigmoid(rho / tau)) x -log sigmoid(rho) + sigmoid(rho / tau) exp(-rho), rho = beta Delta (2406.08414, eq. 5)."""
    rho = beta * delta(pair)
    gate = sigmoid(rho / tau)
    exponential = torch.exp(-rho) if constant(rho) > -50 else 0.0  # the gate is 0 there
    return (1 - gate) * -log_sigmoid(rho) + gate * exponential


# Without a reference


def shaped(row: Row, alpha: float, averaged: bool) -> Scalar:
    """(1 - p^-alpha) / alpha, log p the sum or the mean of the log-probabilities (2501.03884, eq. 5)."""
    logprob = total(row) / (max(row.length, 1) if averaged else 1)
    if not alpha:
        return logprob
    return (1 - torch.exp(-alpha * logprob)) / alpha if isinstance(logprob, Tensor) else 0.0


def alphapo(pair: Pair, *, beta: float, gamma: float, alpha: float, smoothing: float = 0.0) -> Scalar:
    chosen, rejected = (shaped(row, alpha, True) for row in pair)
    x = beta * (chosen - rejected) - gamma
    return -(1 - smoothing) * log_sigmoid(x) - smoothing * log_sigmoid(-x)


def cpo(pair: Pair, *, beta: float, kind: str, averaged: bool = False, smoothing: float = 0.0) -> Scalar:
    """The preference term (2401.08417, eq. 3), and its hinge and IPO forms."""
    gap = shaped(pair[0], 0.0, averaged) - shaped(pair[1], 0.0, averaged)
    if kind == "hinge":
        return max(1 - beta * gap, 0.0 * gap)
    if kind == "ipo":
        return (gap - 1 / (2 * beta)) ** 2
    return -(1 - smoothing) * log_sigmoid(beta * gap) - smoothing * log_sigmoid(-beta * gap)


# Over the pairs of the whole step


def ranked(values: Sequence[Scalar]) -> list[Scalar]:
    return sorted(values, key=constant)


def aot(pairs: Sequence[Pair], *, beta: float, smoothing: float = 0.0) -> Scalar:
    """Sorted margins of the policy against sorted margins of the reference (2406.05882, eq. 6, as TRL smooths it)."""
    margins = ranked([total(chosen) - total(rejected) for chosen, rejected in pairs])
    reference = ranked([sum(chosen.reference) - sum(rejected.reference) for chosen, rejected in pairs])
    gaps = [beta * (policy - own) for policy, own in zip(margins, reference, strict=True)]
    return mean([-(1 - smoothing) * log_sigmoid(x) - smoothing * log_sigmoid(-x) for x in gaps])


def aot_unpaired(pairs: Sequence[Pair], *, beta: float, smoothing: float = 0.0) -> Scalar:
    """Sorted log-ratios of chosen against sorted log-ratios of rejected completions (2406.05882, eq. 4)."""
    chosen, rejected = (ranked([log_ratio(pair[side]) for pair in pairs]) for side in (0, 1))
    gaps = [beta * (better - worse) for better, worse in zip(chosen, rejected, strict=True)]
    return mean([-(1 - smoothing) * log_sigmoid(x) - smoothing * log_sigmoid(-x) for x in gaps])


def apo_zero_unpaired(judged: Sequence[Row], *, beta: float, desirable: float, undesirable: float) -> Scalar:
    """lambda_D (1 - sigmoid(beta log-ratio)) for desirable completions, lambda_U sigmoid(beta log-ratio) for others."""
    signs = [(desirable, -1) if row.reward > 0.5 else (undesirable, 1) for row in judged]
    return mean([weight * sigmoid(sign * beta * log_ratio(row)) for row, (weight, sign) in zip(judged, signs, strict=True)])


def best_against_worst(groups: Sequence[Sequence[Row]], *, beta: float, kind: str = "sigmoid") -> Scalar:
    """The mean over groups whose rewards vary of DPO's or IPO's loss of (highest, lowest reward) (2402.04792)."""
    pairs = []
    for rows in groups:
        best, worst = max(rows, key=lambda row: row.reward), min(rows, key=lambda row: row.reward)
        differ = best.reward - worst.reward > 1e-6 * max(abs(best.reward), abs(worst.reward))  # more than rounding
        if differ and best.length + worst.length:
            pairs.append((best, worst))
    losses = [ipo(pair, beta=beta) if kind == "ipo" else dpo(pair, beta=beta) for pair in pairs]
    return mean(losses) if losses else 0.0
