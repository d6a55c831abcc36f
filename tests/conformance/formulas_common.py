"""What the formulas share: rollouts as lists of float64 scalars, and the four ways to make a scalar of them.

Everything is a plain loop over rollouts and tokens, to be read beside the papers. A scalar is a Python float where nothing is
differentiated and a 0-dimensional torch.float64 tensor where something is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Scalar = float | Tensor


@dataclass(frozen=True)
class Row:
    """One rollout of an optimizer step: i in the papers; its lists run over the tokens t of its completion."""

    group: int
    reward: float
    now: list[Tensor]  # log pi_theta
    before: list[float]  # log pi_old: the learner before the update
    sampler: list[float]  # log mu: what the engine recorded
    reference: list[float]  # log pi_ref
    teacher: list[float]
    entropy: list[Tensor]
    value: list[float]
    new_value: list[Tensor]
    advantage: list[float]  # A_t
    counts: bool  # False: filtered, in no sum and no denominator
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.now)

    @property
    def tokens(self) -> range:
        return range(len(self.now))


Terms = Callable[[Row], Sequence[Scalar]]


def exp(x: Scalar) -> Scalar:
    return torch.exp(x) if isinstance(x, Tensor) else math.exp(x)


def log(x: Scalar) -> Scalar:
    return torch.log(x) if isinstance(x, Tensor) else math.log(x)


def constant(x: Scalar) -> float:
    """sg(x): its value, without its gradient."""
    return float(x.detach()) if isinstance(x, Tensor) else x


def clip(x: Scalar, low: float, high: float) -> Scalar:
    return min(max(x, low), high)


def sigmoid(x: Scalar) -> Scalar:
    """1 / (1 + e^-x), in the form that does not overflow."""
    return 1 / (1 + exp(-x)) if x >= 0 else exp(x) / (1 + exp(x))


def softplus(x: Scalar) -> Scalar:
    """log(1 + e^x)."""
    if isinstance(x, Tensor):
        return x + torch.log1p(torch.exp(-x)) if x >= 0 else torch.log1p(torch.exp(x))
    return x + math.log1p(math.exp(-x)) if x >= 0 else math.log1p(math.exp(x))


def log_sigmoid(x: Scalar) -> Scalar:
    return -softplus(-x)


def mean(values: Sequence[Scalar]) -> Scalar:
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Population standard deviation."""
    middle = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values))


def counted(rows: Sequence[Row]) -> list[Row]:
    """The rollouts that are divided by: not filtered, and with at least one token."""
    return [row for row in rows if row.counts and row.length]


def token_mean(rows: Sequence[Row], terms: Terms) -> Scalar:
    """1 / (sum of |o_i|) x sum over i and t: every token weighs the same (DAPO, 2503.14476, eq. 12)."""
    total: Scalar = 0.0
    tokens = 0
    for row in counted(rows):
        values = terms(row)
        for t in row.tokens:
            total = total + values[t]
            tokens += 1
    return total / max(tokens, 1)


def sequence_mean(rows: Sequence[Row], terms: Terms) -> Scalar:
    """1/G sum over i of 1/|o_i| sum over t: every rollout weighs the same (GRPO as published, 2402.03300)."""
    total: Scalar = 0.0
    for row in counted(rows):
        values = terms(row)
        total = total + sum(values[t] for t in row.tokens) / row.length
    return total / max(len(counted(rows)), 1)


def sequence_sum(rows: Sequence[Row], terms: Terms) -> Scalar:
    """1/G sum over i of sum over t: the log-probability of a whole rollout as one action (RLOO, 2402.14740)."""
    total: Scalar = 0.0
    for row in counted(rows):
        values = terms(row)
        for t in row.tokens:
            total = total + values[t]
    return total / max(len(counted(rows)), 1)


def constant_length(rows: Sequence[Row], terms: Terms, length: int) -> Scalar:
    """1/G sum over i of 1/L_max sum over t, with the same L_max in every step (Dr.GRPO, 2503.20783)."""
    return sequence_sum(rows, terms) / length


AGGREGATIONS: dict[str, Callable[[Sequence[Row], Terms], Scalar]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
}
