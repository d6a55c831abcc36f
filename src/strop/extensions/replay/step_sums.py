"""Sums over all tokens of a stored step, without creating its records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.monitoring.rollout_store.inflated_files import read_table


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Sums over the rollouts of a step."""

    terms: Mapping[str, float]  # of the loss, by term
    gradient_squares: float  # sum over tokens of squared derivatives of the policy's loss with respect to the logits


def read_step_sums(path: Path) -> StepSums:
    """Read the sums from the file of a step."""
    terms: dict[str, float] = {}
    squares = 0.0
    for loss_terms, gradients in _read_columns(path):
        for name, values in loss_terms.items():
            terms[name] = terms.get(name, 0.0) + float(values.sum())
        of_policy = [values for name, values in gradients.items() if "/" not in name]
        squares += float((sum(of_policy[1:], of_policy[0]) ** 2).sum()) if of_policy else 0.0
    return StepSums(terms=terms, gradient_squares=squares)


def _read_columns(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the terms and gradients of one or many rollouts, as float64 arrays over tokens."""
    import numpy

    if path.suffix == ".parquet":
        for batch in read_table(path, ["loss_terms", "loss_gradients"]).to_batches():
            yield _by_name(batch.column(0)), _by_name(batch.column(1))
        return
    with path.open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            terms, gradients = (row.get(name) or {} for name in ("loss_terms", "loss_gradients"))
            yield _to_arrays(numpy, terms.items()), _to_arrays(numpy, gradients.items())


def _to_arrays(numpy: Any, columns: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: numpy.array([float(value) for value in values], dtype=numpy.float64) for name, values in columns}


def _by_name(column: Any) -> dict[str, Any]:
    """Return the values of a column of maps by name, over all rows in order. Rows have the same names, or none."""
    keys, items = column.keys, column.items
    found = {
        name: items.filter(_equal(keys, name)).flatten().to_numpy(zero_copy_only=False) for name in keys.unique().to_pylist()
    }
    return {name: values.astype("float64") for name, values in found.items()}


def _equal(keys: Any, name: str) -> Any:
    import pyarrow.compute

    return pyarrow.compute.equal(keys, name)
