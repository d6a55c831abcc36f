"""Metrics that can be merged over micro-batches, ranks and steps.

Each metric carries its denominator: a mean has a weight, so merging the means of two parts gives the mean of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A value that stands for ``weight`` units; ``reduction`` says how two parts of the same metric are merged."""

    value: float
    weight: float = 1.0
    reduction: Literal["mean", "sum", "max", "min"] = "mean"

    def merge(self, other: Metric) -> Metric:
        if self.reduction != other.reduction:
            raise ValueError(f"cannot merge a {self.reduction} with a {other.reduction}")
        weight = self.weight + other.weight
        match self.reduction:
            case "sum":
                return Metric(self.value + other.value, weight, "sum")
            case "max":
                return Metric(max(self.value, other.value), weight, "max")
            case "min":
                return Metric(min(self.value, other.value), weight, "min")
            case "mean":
                if weight == 0:
                    return self
                return Metric((self.value * self.weight + other.value * other.weight) / weight, weight, "mean")


Metrics = Mapping[str, Metric]


def mean(value: float, weight: float) -> Metric:
    return Metric(value, weight, "mean")


def total(value: float) -> Metric:
    """Return a metric that sums over parts. Also use it for a quantity that is already divided by a global count."""
    return Metric(value, 1.0, "sum")


def maximum(value: float) -> Metric:
    return Metric(value, 1.0, "max")


def to_step_mean(metric: Metric) -> Metric:
    """Turn a sum over the parts of one optimizer step into a mean over steps; return other metrics unchanged."""
    return Metric(metric.value, 1.0, "mean") if metric.reduction == "sum" else metric


def merge(*parts: Metrics) -> dict[str, Metric]:
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def to_floats(metrics: Metrics) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}
