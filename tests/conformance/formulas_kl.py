"""Schulman's estimators of KL(pi || pi_ref) from tokens that pi sampled (joschu.net/blog/kl-approx.html), and where they go."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.formulas_common import Row, Scalar, clip, constant, exp


def k1(now: Scalar, reference: float) -> Scalar:
    """-log r, r = pi_ref / pi."""
    return now - reference


def k2(now: Scalar, reference: float) -> Scalar:
    """(log r)^2 / 2."""
    return (reference - now) ** 2 / 2


def k3(now: Scalar, reference: float) -> Scalar:
    """(r - 1) - log r."""
    d = reference - now
    return (exp(d) - 1) - d


def absolute(now: Scalar, reference: float) -> Scalar:
    """|log r| (2009.01325's code)."""
    return abs(now - reference)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}


def clamped(estimator: str, now: Scalar, reference: float, inside: float | None, outside: float | None) -> Scalar:
    """An estimate of a clamped log ratio, clamped again."""
    if inside is not None:
        d = clip(reference - now, -inside, inside)
        now, reference = -d, 0.0
    estimate = ESTIMATORS[estimator](now, reference)
    return estimate if outside is None else clip(estimate, -outside, outside)


def in_loss(row: Row, estimator: str, *, inside: float | None = None, outside: float | None = None) -> list[Scalar]:
    return [clamped(estimator, row.now[t], row.reference[t], inside, outside) for t in row.tokens]


def unbiased(row: Row, estimator: str) -> list[Scalar]:
    """(pi / mu) x k: its expectation and its gradient are those of the KL, although mu sampled (2512.02556)."""
    return [exp(row.now[t] - row.sampler[t]) * ESTIMATORS[estimator](row.now[t], row.reference[t]) for t in row.tokens]


def unbiased_within(row: Row, estimator: str, inside: float, outside: float) -> list[Scalar]:
    """The same as NeMo-RL bounds it: the log ratio to the reference first, the product with the weight last, and no gradient through the
    weight where the first bound applies."""
    terms = []
    for t in row.tokens:
        weight = exp(row.now[t] - row.sampler[t])
        if abs(row.reference[t] - constant(row.now[t])) > inside:
            weight = constant(weight)
        terms.append(clip(weight * clamped(estimator, row.now[t], row.reference[t], inside, None), -outside, outside))
    return terms


def rewards_less_kl(rows: Sequence[Row], estimator: str, weight: float) -> list[float]:
    """R - beta sum over t of KL_t, by the policy before the update (2009.01325)."""
    return [row.reward - weight * sum(ESTIMATORS[estimator](row.before[t], row.reference[t]) for t in row.tokens) for row in rows]


def to_come(row: Row, estimator: str, *, inside: float | None = None, outside: float | None = None) -> list[float]:
    """For token t: sum over s >= t of KL_s, what a return-to-go sees of a penalty in each token's reward."""
    each = [float(clamped(estimator, row.before[t], row.reference[t], inside, outside)) for t in row.tokens]
    return [sum(each[t:]) for t in row.tokens]


def adapted(weight: float, rows: Sequence[Row], estimator: str, *, target: float, horizon: int) -> float:
    """beta (1 + clip(KL / target - 1, -0.2, 0.2) n / K), KL a mean over n rollouts of means over their tokens (1909.08593, 2.2)."""
    counted = [row for row in rows if row.counts and row.length]
    means = [
        sum(float(ESTIMATORS[estimator](row.before[t], row.reference[t])) for t in row.tokens) / row.length for row in counted
    ]
    return weight * (1 + float(clip(sum(means) / len(means) / target - 1, -0.2, 0.2)) * len(rows) / horizon)
