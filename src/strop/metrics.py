"""Metrics that can be merged over micro-batches, ranks and steps.

Each metric carries its denominator: a mean has a weight, so merging the means of two parts gives the mean of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard

from strop.device_copies import move
from strop.lazy_torch import Tensor


@dataclass(frozen=True)
class Metric:
    """A value for ``weight`` units; ``reduction`` determines how two parts of the same metric are merged."""

    number: float | Tensor  # []: stays on its device until it is merged or read
    weight: float = 1.0
    reduction: Literal["mean", "sum", "max", "min"] = "mean"

    @property
    def value(self) -> float:
        """The value; waits for the GPU if it is on one."""
        return float(self.number)

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


def mean(value: float | Tensor, weight: float) -> Metric:
    return Metric(_detach(value), weight, "mean")


def total(value: float | Tensor) -> Metric:
    """Return a metric that sums over parts. Also use it for a quantity that is already divided by a global count."""
    return Metric(_detach(value), 1.0, "sum")


def maximum(value: float | Tensor) -> Metric:
    return Metric(_detach(value), 1.0, "max")


def _detach(value: float | Tensor) -> float | Tensor:
    return value.detach() if _is_tensor(value) else value


def _is_tensor(value: float | Tensor) -> TypeGuard[Tensor]:
    return hasattr(value, "detach")  # avoids importing torch


def to_step_mean(metric: Metric) -> Metric:
    """Turn a sum over the parts of one optimizer step into a mean over steps; return other metrics unchanged."""
    return Metric(metric.value, 1.0, "mean") if metric.reduction == "sum" else metric


def merge(*parts: Metrics) -> dict[str, Metric]:
    """Merge the metrics of parts, in order. Those on a GPU are read in one copy."""
    merged: dict[str, Metric] = {}
    for part in _read(parts):
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def _read(parts: Sequence[Metrics]) -> Sequence[Metrics]:
    """Return metrics whose values are Python numbers."""
    numbers = [metric.number for part in parts for metric in part.values() if _is_tensor(metric.number)]
    if not numbers:
        return parts
    values = iter([number.item() for number in move(numbers, "cpu")])
    return [
        {name: replace(metric, number=next(values)) if _is_tensor(metric.number) else metric for name, metric in part.items()}
        for part in parts
    ]


def to_floats(metrics: Metrics) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}
