"""Credit of tokens from the rewards of steps. A step is (index of its last token, reward); a group is a list of rollouts' steps."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.formulas_common import deviation, mean

Steps = Sequence[tuple[int, float]]
EPS = 1e-6


def process_supervision(group: Sequence[Steps], lengths: Sequence[int]) -> list[list[float]]:
    """A_t = sum over the steps that end at t or later of (r - mean R) / std R, R all step rewards of the group (2402.03300, 4.1.3)."""
    every = [reward for steps in group for _, reward in steps]
    if not every or max(every) == min(every):
        return [[0.0] * length for length in lengths]
    scaled = [[(end, (reward - mean(every)) / (deviation(every) + EPS)) for end, reward in steps] for steps in group]
    return [
        [sum(value for end, value in steps if end >= t) for t in range(length)]
        for steps, length in zip(scaled, lengths, strict=True)
    ]


def prime(group: Sequence[Steps], outcomes: Sequence[float], lengths: Sequence[int]) -> list[list[float]]:
    """r_o - mean over the others + sum over later steps of (r - mean over the others of the mean of their steps) (2502.01456, eq. 5)."""
    means = [mean([reward for _, reward in steps]) for steps in group]
    credit = []
    for i, (steps, length) in enumerate(zip(group, lengths, strict=True)):
        others = [j for j in range(len(group)) if j != i]
        outcome = outcomes[i] - mean([outcomes[j] for j in others])
        baseline = mean([means[j] for j in others])
        credit.append([outcome + sum(reward - baseline for end, reward in steps if end >= t) for t in range(length)])
    return credit


def token_rewards(steps: Steps, total: float, length: int) -> list[float]:
    """The rewards of steps where they end; what else there is of the rollout's reward at the last token."""
    placed = [sum(reward for end, reward in steps if end == t) for t in range(length)]
    placed[-1] += total - sum(placed)
    return placed
