"""Generalised advantage estimation, the value loss, and what says how good a critic is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from conformance.formulas_common import Row, Scalar, clip, deviation


def temporal_differences(rewards: Sequence[float], values: Sequence[float], gamma: float) -> list[float]:
    """delta_t = r_t + gamma V(s_{t+1}) - V(s_t), V after the last token 0 (1506.02438)."""
    following = [*values, 0.0][1:]
    return [reward + gamma * after - value for reward, value, after in zip(rewards, values, following, strict=True)]


def gae(rewards: Sequence[float], values: Sequence[float], *, gamma: float, lam: float) -> list[float]:
    """A_t = sum over l of (gamma lambda)^l delta_{t+l} (1506.02438, eq. 16), term by term."""
    deltas = temporal_differences(rewards, values, gamma)
    return [
        math.fsum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(deltas))) for t in range(len(deltas))
    ]


def length_adaptive(length: int, alpha: float) -> float:
    """lambda = 1 - 1 / (alpha l) (VAPO, 2504.05118); never below 0."""
    return max(0.0, 1 - 1 / (alpha * length))


def token_rewards(row: Row, penalties: Sequence[float] | None = None) -> list[float]:
    """The rollout's reward at its last token, less each token's KL penalty."""
    rewards = [0.0] * row.length
    if rewards:
        rewards[-1] = row.reward
    return rewards if penalties is None else [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]


def returns(advantages: Sequence[float], values: Sequence[float]) -> list[float]:
    """What the critic learns: A_t + V_t, A not whitened."""
    return [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def value_loss(row: Row, targets: Sequence[float], *, cliprange: float | None) -> list[Scalar]:
    """1/2 max((V - R)^2, (clip(V, V_old +- eps) - R)^2), each token (2005.12729)."""
    losses = []
    for t in row.tokens:
        plain = (row.new_value[t] - targets[t]) ** 2
        if cliprange is None:
            losses.append(plain / 2)
        else:
            bounded = clip(row.new_value[t], row.value[t] - cliprange, row.value[t] + cliprange)
            losses.append(max(plain, (bounded - targets[t]) ** 2) / 2)
    return losses


def explained_variance(values: Sequence[float], targets: Sequence[float]) -> float:
    """1 - Var(R - V) / Var(R)."""
    errors = [target - value for target, value in zip(targets, values, strict=True)]
    return 1 - deviation(errors) ** 2 / deviation(list(targets)) ** 2
