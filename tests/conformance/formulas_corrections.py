"""Weights for the mismatch between the policy that sampled (mu) and the learner before the update (pi_old): w = pi_old / mu.

Each formula takes the log ratios of one rollout, log w_t, and gives a weight for each of its tokens. None has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LARGEST = 60.0  # nats: a weight beyond e^60 is as good as infinite, and has to stay a float32 that can be multiplied


def weight(log: float) -> float:
    return math.exp(min(log, LARGEST))


def importance(logs: Sequence[float]) -> list[float]:
    """w_t."""
    return [weight(log) for log in logs]


def tis(logs: Sequence[float], *, cap: float) -> list[float]:
    """min(w_t, C): truncated importance sampling (fengyao.notion.site/off-policy-rl)."""
    return [min(weight(log), cap) for log in logs]


def sequence_importance(logs: Sequence[float]) -> list[float]:
    """prod of w, for each token of the rollout."""
    return [weight(sum(logs)) for _ in logs]


def floored_tis(logs: Sequence[float], *, cap: float, floor: float) -> list[float]:
    """max(floor, min(w_t, C)): bounded on both sides."""
    return [max(floor, min(weight(log), cap)) for log in logs]


def sequence_tis(logs: Sequence[float], *, cap: float) -> list[float]:
    """min(prod of w, C), for each token of the rollout."""
    return [min(weight(sum(logs)), cap) for _ in logs]


def mis(logs: Sequence[float], *, low: float, high: float) -> list[float]:
    """w_t where low <= w_t <= high, else 0: masked importance sampling; IcePop (2510.18855) is this per token."""
    return [weight(log) if low <= weight(log) <= high else 0.0 for log in logs]


def sequence_mis(logs: Sequence[float], *, low: float, high: float) -> list[float]:
    """The rollout's product, where it is inside."""
    product = weight(sum(logs))
    return [product if low <= product <= high else 0.0 for _ in logs]


def geometric_mean(logs: Sequence[float]) -> float:
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def geometric_rejection(logs: Sequence[float], *, low: float, high: float) -> list[float]:
    """Keep the rollout, with weight 1, where low <= exp(mean log w) <= high."""
    return [float(low <= geometric_mean(logs) <= high) for _ in logs]


def sequence_mask_tis(logs: Sequence[float], *, low: float, high: float, cap: float | None = None) -> list[float]:
    """Keep the rollout where low <= exp(mean log w) <= high; its tokens keep their w_t, capped or not."""
    kept = low <= geometric_mean(logs) <= high
    return [(weight(log) if cap is None else min(weight(log), cap)) if kept else 0.0 for log in logs]


def k3_rejection(logs: Sequence[float], *, cap: float) -> list[float]:
    """Keep the rollout where mean(w - log w - 1) <= c."""
    divergence = sum(weight(log) - log - 1 for log in logs) / max(len(logs), 1)
    return [float(divergence <= cap) for _ in logs]


def opsm(logs: Sequence[float], advantage: float, *, delta: float) -> list[float]:
    """Drop the rollout where A < 0 and mean(log mu - log pi) > delta, pi the policy that is trained (2512.02556, eq. 9)."""
    far = sum(-log for log in logs) / max(len(logs), 1) > delta
    return [0.0 if advantage < 0 and far else 1.0 for _ in logs]


def bernoulli_kl(p: float, q: float) -> float:
    """KL of Bernoulli(p) to Bernoulli(q): the sampled token against all others."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def kpop(before: Sequence[float], sampler: Sequence[float], *, phi: float) -> list[float]:
    """0 where max(KL(pi || mu), KL(mu || pi)) of the two Bernoullis is more than phi, else 1."""
    kept = []
    for b, s in zip(before, sampler, strict=True):
        p, q = math.exp(b), math.exp(s)
        kept.append(0.0 if max(bernoulli_kl(p, q), bernoulli_kl(q, p)) > phi else 1.0)
    return kept


def divergence_rejection(logs: Sequence[float], *, estimator: str, level: str, low: float = 0.0, high: float) -> list[float]:
    """verl's hard trust regions: token_k1 ... seq_max_k3, k1 = log w, k2 = (log w)^2 / 2, k3 = w - 1 - log w (k1 with its sign turned)."""
    each = [{"k1": log, "k2": log**2 / 2, "k3": weight(log) - 1 - log}[estimator] for log in logs]
    if level != "token" and logs:
        whole = {"sum": sum(each), "mean": sum(each) / len(each), "max": max(each)}[level]
        each = [whole] * len(logs)
    return [float(low <= (weight(value) if estimator == "k1" else value) <= high) for value in each]
