"""Policy objectives, to be maximised: for one rollout, what each of its tokens contributes.

rho = pi_theta / pi_old. An objective about whole rollouts gives every token the rollout's value, so that a mean over tokens is that value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from conformance.formulas_common import Row, Scalar, clip, constant, counted, exp, mean, sigmoid


def ratios(row: Row) -> list[Scalar]:
    return [exp(row.now[t] - row.before[t]) for t in row.tokens]


def sampler_ratios(row: Row) -> list[Scalar]:
    return [exp(row.now[t] - row.sampler[t]) for t in row.tokens]


def ppo_clip(row: Row, *, low: float = 0.2, high: float = 0.2) -> list[Scalar]:
    """min(rho A, clip(rho, 1 - low, 1 + high) A)  (1707.06347, eq. 7; high > low: DAPO, 2503.14476, eq. 10)."""
    terms = []
    for rho, advantage in zip(ratios(row), row.advantage, strict=True):
        terms.append(min(rho * advantage, clip(rho, 1 - low, 1 + high) * advantage))
    return terms


def dual_clip(row: Row, *, low: float = 0.2, high: float = 0.2, dual: float) -> list[Scalar]:
    """Where A < 0: max(min(rho A, clip(rho) A), c A)  (1912.09729)."""
    terms = ppo_clip(row, low=low, high=high)
    return [max(term, dual * advantage) if advantage < 0 else term for term, advantage in zip(terms, row.advantage, strict=True)]


def two_sided_clip(row: Row, *, low: float = 0.2, high: float = 0.2, delta: float) -> list[Scalar]:
    """min(min(rho, delta) A, clip(rho, 1 - low, 1 + high) A)  (2505.07291)."""
    terms = []
    for rho, advantage in zip(ratios(row), row.advantage, strict=True):
        terms.append(min(min(rho, delta) * advantage, clip(rho, 1 - low, 1 + high) * advantage))
    return terms


def gspo(row: Row, *, low: float, high: float, length_weighted: bool = False) -> list[Scalar]:
    """min(s A, clip(s) A), s = (pi_theta(y) / pi_old(y))^(1/|y|)  (2507.18071, eq. 5 and 7).

    LUSPO (2602.05261) multiplies the objective of each rollout by its length.
    """
    if not row.length:
        return []
    s = exp(sum(row.now[t] - row.before[t] for t in row.tokens) / row.length)
    advantage = row.advantage[0]
    value = min(s * advantage, clip(s, 1 - low, 1 + high) * advantage)
    return [value * (row.length if length_weighted else 1) for _ in row.tokens]


def gmpo(row: Row, *, low: float = 0.4, high: float = 0.4) -> list[Scalar]:
    """The geometric mean of token ratios, each clipped to (e^-low, e^high) on the side that PPO's min clips, times A (2507.20673)."""
    if not row.length:
        return []
    advantage = row.advantage[0]
    logs = []
    for t in row.tokens:
        d = row.now[t] - row.before[t]
        logs.append(min(d, clip(d, -low, high)) if advantage > 0 else max(d, clip(d, -low, high)))
    return [exp(sum(logs) / row.length) * advantage for _ in row.tokens]


def cispo(row: Row, *, low: float, high: float) -> list[Scalar]:
    """sg(clip(rho, 1 - low, 1 + high)) A log pi  (2506.13585)."""
    return [
        constant(clip(rho, 1 - low, 1 + high)) * advantage * now
        for rho, advantage, now in zip(ratios(row), row.advantage, row.now, strict=True)
    ]


def topr(row: Row, *, cap: float = 1.0) -> list[Scalar]:
    """A log pi where A >= 0, sg(min(prod pi / mu, cap)) A log pi where A < 0  (2503.14286)."""
    if not row.length:
        return []
    drift = sum(constant(now) - sampler for now, sampler in zip(row.now, row.sampler, strict=True))
    tapered = math.exp(min(drift, math.log(cap)))
    return [(tapered if a < 0 else 1.0) * a * now for a, now in zip(row.advantage, row.now, strict=True)]


def reinforce(row: Row) -> list[Scalar]:
    """A log pi (Williams, 1992)."""
    return [advantage * now for advantage, now in zip(row.advantage, row.now, strict=True)]


def sapo(row: Row, *, positive: float = 1.0, negative: float = 1.05) -> list[Scalar]:
    """(4 / tau) sigmoid(tau (rho - 1)) A, tau by the sign of A  (2511.20347)."""
    terms = []
    for rho, advantage in zip(ratios(row), row.advantage, strict=True):
        tau = positive if advantage > 0 else negative
        terms.append(4 / tau * sigmoid(tau * (rho - 1)) * advantage)
    return terms


def dppo(row: Row, *, low: float, high: float, cap: float) -> list[Scalar]:
    """M sg(min(r, C)) A log pi with r = pi / mu, and M = 0 where the update would leave the trust region |pi - mu| <= delta:
    A > 0 and pi - mu > delta, or A < 0 and pi - mu < -delta (2602.04879, binary total variation).
    """
    terms = []
    for t in row.tokens:
        difference = math.exp(constant(row.now[t])) - math.exp(row.sampler[t])
        advantage = row.advantage[t]
        inside = difference <= high if advantage > 0 else difference >= -low
        terms.append(constant(min(sampler_ratios(row)[t], cap)) * advantage * row.now[t] * float(inside))
    return terms


def vespo(row: Row, *, positive: tuple[float, float] = (2.0, 3.0), negative: tuple[float, float] = (3.0, 2.0)) -> list[Scalar]:
    """sg(phi(W)) A log pi, phi(W) = W^c1 exp(c2 (1 - W)), W = product over the rollout of pi / mu (2602.10693)."""
    if not row.length:
        return []
    total = sum(constant(row.now[t]) - row.sampler[t] for t in row.tokens)
    power, decay = positive if row.advantage[0] > 0 else negative
    phi = math.exp(max(power * total + decay * (1 - math.exp(min(total, 600.0))), -745.0))
    return [phi * advantage * now for advantage, now in zip(row.advantage, row.now, strict=True)]


def outward(row: Row, t: int) -> bool:
    """Whether the update pushes pi further from mu: A > 0 and r > 1, or A < 0 and r < 1."""
    log = constant(row.now[t]) - row.sampler[t]
    return row.advantage[t] * log > 0


def m2po(rows: Sequence[Row], *, limit: float, outward_only: bool) -> dict[tuple[int, int], bool]:
    """M: mask the tokens with the largest (log r)^2, r = pi / mu, one after the other, until the mean over those left is at most tau
    (2510.01161). ``outward_only``: of the tokens that a clip would act on.
    """
    tokens = [
        ((constant(row.now[t]) - row.sampler[t]) ** 2, (i, t))
        for i, row in enumerate(rows)
        if row.counts
        for t in row.tokens
        if not outward_only or outward(row, t)
    ]
    tokens.sort()
    masked = set()
    while tokens and math.fsum(square for square, _ in tokens) / len(tokens) > limit:
        masked.add(tokens.pop()[1])
    return {(i, t): (i, t) not in masked for i, row in enumerate(rows) for t in row.tokens}


def covariances(rows: Sequence[Row]) -> dict[tuple[int, int], float]:
    """(log pi - mean log pi) x (A - mean A) over the tokens that count (2505.22617)."""
    tokens = [(i, t) for i, row in enumerate(rows) if row.counts for t in row.tokens]
    logs = {(i, t): constant(rows[i].now[t]) for i, t in tokens}
    mean_log = mean(list(logs.values())) if tokens else 0.0
    mean_advantage = mean([rows[i].advantage[t] for i, t in tokens]) if tokens else 0.0
    return {(i, t): (logs[i, t] - mean_log) * (rows[i].advantage[t] - mean_advantage) for i, t in tokens}


def largest(values: dict[tuple[int, int], float], share: float) -> set[tuple[int, int]]:
    """The ``share`` of all tokens with the largest values, at least one."""
    ranked = sorted(values, key=lambda place: -values[place])
    return set(ranked[: max(1, int(share * len(ranked)))]) if ranked else set()


def clip_cov(
    rows: Sequence[Row], *, low: float = 0.2, high: float = 0.2, share: float, lowest: float, highest: float
) -> dict[tuple[int, int], bool]:
    """The tokens that lose their gradient: the ``share`` r of all tokens, of those with lowest < Cov < highest that PPO's clip does not
    hold already (2505.22617; the paper draws them, here they are those with the largest covariance).
    """
    found = covariances(rows)
    for (i, t), covariance in list(found.items()):
        held = low_or_high(constant(rows[i].now[t]) - rows[i].before[t], rows[i].advantage[t], low, high)
        if held or not lowest < covariance < highest:
            del found[i, t]
    number = max(1, int(share * sum(row.length for row in counted(rows))))
    chosen = sorted(found, key=lambda place: -found[place])[:number]
    return {(i, t): (i, t) in chosen for i, row in enumerate(rows) for t in row.tokens}


def low_or_high(log: float, advantage: float, low: float, high: float) -> bool:
    """Whether PPO's clip holds the token: no gradient is left."""
    ratio = math.exp(log)
    return (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)


def kl_cov(rows: Sequence[Row], row: Row, *, share: float, weight: float) -> list[Scalar]:
    """rho A, and - beta |log rho| for the ``share`` of tokens with the largest covariance (2505.22617; the estimate of
    KL(pi_old || pi) is that of the authors' code).
    """
    penalised = largest(covariances(rows), share)
    i = next(place for place, other in enumerate(rows) if other is row)
    terms = []
    for t in row.tokens:
        d = row.now[t] - row.before[t]
        terms.append(exp(d) * row.advantage[t] - weight * abs(d) * float((i, t) in penalised))
    return terms


def top_entropy(rows: Sequence[Row], share: float) -> dict[tuple[int, int], bool]:
    """The ``share`` of all tokens that count with the largest entropy, to the nearest token, at least one (2506.01939)."""
    entropies = {(i, t): constant(row.entropy[t]) for i, row in enumerate(rows) if row.counts for t in row.tokens}
    ranked = sorted(entropies, key=lambda place: -entropies[place])
    chosen = set(ranked[: max(1, round(share * len(ranked)))])
    return {(i, t): (i, t) in chosen for i, row in enumerate(rows) for t in row.tokens}
