"""Metrics as a data frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas


class MetricSeries(pandas.Series):  # type: ignore[misc]
    """The values of one metric by step. A negative position counts from the last logged value: ``[-1]`` is the newest."""

    @property
    def _constructor(self) -> Callable[..., MetricSeries]:
        return MetricSeries

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and key < 0:
            return self.dropna().iloc[key]
        return super().__getitem__(key)


class MetricsTable(pandas.DataFrame):  # type: ignore[misc]
    """Metrics by step: a data frame whose columns are ``MetricSeries``."""

    @property
    def _constructor(self) -> Callable[..., MetricsTable]:
        return MetricsTable

    @property
    def _constructor_sliced(self) -> Callable[..., MetricSeries]:
        return MetricSeries


def make_metrics_table(steps: Sequence[tuple[int, Mapping[str, float]]]) -> MetricsTable:
    """Return a table with the metrics of each step. A step that was logged twice has the values of both."""
    merged: dict[int, dict[str, float]] = {}
    for step, values in steps:
        merged.setdefault(step, {}).update(values)
    return MetricsTable(list(merged.values()), index=pandas.Index(list(merged), name="step", dtype="int64"))
