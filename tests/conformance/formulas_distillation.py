"""Divergences between a teacher and a student on the teacher's k most likely tokens. log-probabilities are lists over those tokens."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.formulas_common import Scalar, exp, log


def renormalised(logs: Sequence[Scalar]) -> list[Scalar]:
    """The distribution on the k tokens alone."""
    mass = sum(exp(value) for value in logs)
    return [value - log(mass) for value in logs]


def with_rest(logs: Sequence[Scalar], *, least: float = 1e-7) -> list[Scalar]:
    """The k tokens, and one more event that holds all others. What is left of 1 is known to ``least``, from float32 probabilities."""
    mass = sum(exp(value) for value in logs)
    return [*logs, log(max(1 - mass, least))]


def kl(p: Sequence[Scalar], q: Sequence[Scalar]) -> Scalar:
    """sum of p (log p - log q)."""
    return sum(exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def forward(teacher: Sequence[Scalar], student: Sequence[Scalar]) -> Scalar:
    return kl(teacher, student)


def reverse(teacher: Sequence[Scalar], student: Sequence[Scalar]) -> Scalar:
    return kl(student, teacher)


def mixed(teacher: Sequence[Scalar], student: Sequence[Scalar], *, weight: float) -> Scalar:
    """weight x forward + (1 - weight) x reverse."""
    return weight * forward(teacher, student) + (1 - weight) * reverse(teacher, student)


def jsd(teacher: Sequence[Scalar], student: Sequence[Scalar], *, beta: float) -> Scalar:
    """beta KL(P || M) + (1 - beta) KL(Q || M), M = beta P + (1 - beta) Q, P the teacher (GKD, 2306.13649)."""
    middle = [log(beta * exp(p) + (1 - beta) * exp(q)) for p, q in zip(teacher, student, strict=True)]
    return beta * kl(teacher, middle) + (1 - beta) * kl(student, middle)


def mixture(weights: Sequence[float], teachers: Sequence[float]) -> float:
    """log of the weighted mean of several teachers' probabilities."""
    return float(log(sum(weight * exp(teacher) for weight, teacher in zip(weights, teachers, strict=True))))
