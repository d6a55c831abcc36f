"""The ledger of one rollout: what each term of the loss contributed at each token, from what its step stored.

Importing it loads neither torch nor pyarrow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.monitoring.rollout_store.rollout_record import RolloutRecord
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.rollout_store.stored_files import read_table
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics
from strop.storage.files import clean_json


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


COLUMNS = (  # of a RolloutRecord, aligned with its tokens
    "sampled", "sampler_logprobs", "learner_logprobs", "trained_logprobs", "entropy", "reference_logprobs", "token_advantages",
    "correction", "clipped", "mask", "mask_reason",
)  # fmt: skip
NOT_STORED = (
    "this step stored no terms of its loss: logger.token_columns was none, the data is recorded (logger.token_columns=all stores it too), "
    "or the run is of an earlier version. They cannot be told from what is stored; `strop replay RUN --step {step}` runs the step again, "
    "where there is a checkpoint of the step before"
)


class LedgerError(ValueError):
    """There is no ledger of a rollout. The message says why, and what there is."""


@dataclass(frozen=True, kw_only=True)
class TokenLedger:
    """What each term of the loss contributed at each token of a rollout. Sequences are aligned with ``tokens``."""

    step: int
    group: int
    sample: int
    task_id: str
    advantage: float | None
    tokens: Sequence[int]  # [L] after the prompt, the environment's too
    columns: Mapping[str, Sequence[Any]]  # name of COLUMNS -> [L]; those that are not stored are left out
    ratio: Sequence[float | None]  # [L] learner before the update / sampler; None where it is not known
    terms: Mapping[str, Sequence[float]] = field(default_factory=dict)  # name -> [L]; those of another learner are LEARNER/NAME
    gradients: Mapping[str, Sequence[float]] = field(default_factory=dict)  # name -> [L] derivative for the token's logit
    gradient: Sequence[float] = ()  # [L] the sum over the policy's terms
    share: Sequence[float] = ()  # [L] its square, divided by the sum over all tokens of the step
    totals: Mapping[str, float] = field(default_factory=dict)  # term -> the sum over this rollout
    step_totals: Mapping[str, float] = field(default_factory=dict)  # term -> the sum over all rollouts of the step
    logged: Mapping[str, float] = field(default_factory=dict)  # the losses that the step logged: train/loss, train/value_loss
    note: str = ""  # why there are no terms

    @property
    def difference(self) -> float | None:
        """The sum of the policy's terms over the step less the logged loss; None if one is not known."""
        if "train/loss" not in self.logged or not self.step_totals:
            return None
        return sum(value for name, value in self.step_totals.items() if "/" not in name) - self.logged["train/loss"]

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger as JSON holds it; numbers that are not finite are None."""
        values = {**vars(self), "difference": self.difference}
        return {name: clean_json(value) for name, value in values.items()}

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict for each token: ``position``, ``token``, the columns, each term, ``gradient/TERM``, gradient and share."""
        columns: dict[str, Sequence[Any]] = {"token": self.tokens, **self.columns, "ratio": self.ratio, **self.terms}
        columns |= {f"gradient/{name}": values for name, values in self.gradients.items()}
        columns |= {name: values for name, values in (("gradient", self.gradient), ("share", self.share)) if values}
        return [
            {"position": place, **{name: values[place] for name, values in columns.items()}} for place in range(len(self.tokens))
        ]


def make_ledger(run_folder: Path, step: int, group: int, sample: int) -> TokenLedger:
    """Make the ledger of a stored rollout. Raises LedgerError if it is not stored."""
    store = RolloutStore(Path(run_folder), "none")
    try:
        record = store.read_one(step, group, sample)
    except FileNotFoundError as error:
        raise LedgerError(str(error)) from error
    if record is None:
        raise LedgerError(
            f"step {step} stored no rollout {group}/{sample} (group, sample); strop rollouts --step {step} lists them"
        )
    return _make(record, read_step_sums(store.path(step)) if record.loss_terms else None, _read_losses(Path(run_folder), step))


def find_rollout(run_folder: Path, step: int, name: str) -> tuple[int, int]:
    """Return (group, sample) of a rollout named GROUP/SAMPLE or TASK/SAMPLE. Raises LedgerError."""
    unit, slash, sample = name.rpartition("/")
    if not slash or not sample.isdecimal():
        raise LedgerError(f"{name!r} names no rollout; write GROUP/SAMPLE, such as 3/0, or TASK/SAMPLE, with the task's id")
    store = RolloutStore(Path(run_folder), "none")
    try:
        keys = store.read_keys(step)
    except FileNotFoundError as error:
        raise LedgerError(str(error)) from error
    groups = [group for group, _, task in keys if task == unit]
    if not groups and unit.isdecimal() and any(group == int(unit) for group, _, _ in keys):
        groups = [int(unit)]
    found = sorted({group for group in groups if any(each[:2] == (group, int(sample)) for each in keys)})
    if not found:
        stored = ", ".join(f"{group}/{index} ({task})" for group, index, task in keys[:4])
        raise LedgerError(f"step {step} stored no rollout {name}; it stored {len(keys)}, such as {stored}")
    return found[0], int(sample)


def _make(record: RolloutRecord, sums: StepSums | None, logged: Mapping[str, float]) -> TokenLedger:
    columns = {name: getattr(record, name) for name in COLUMNS if getattr(record, name) is not None}
    gradient = _add([values for name, values in record.loss_gradients.items() if "/" not in name])
    squares = 0.0 if sums is None else sums.gradient_squares
    return TokenLedger(
        step=record.step,
        group=record.group,
        sample=record.sample,
        task_id=record.task_id,
        advantage=record.advantage,
        tokens=record.tokens,
        columns=columns,
        ratio=_ratios(record),
        terms=record.loss_terms,
        gradients=record.loss_gradients,
        gradient=gradient,
        share=tuple(value * value / squares if squares else 0.0 for value in gradient),
        totals={name: math.fsum(values) for name, values in record.loss_terms.items()},
        step_totals={} if sums is None else sums.terms,
        logged=logged,
        note="" if record.loss_terms else _explain(record),
    )


def _explain(record: RolloutRecord) -> str:
    """Say why a rollout has no terms."""
    if not record.kept:
        return f"its group was dropped ({record.dropped_because}) and not trained on, so it contributed nothing to the loss"
    return NOT_STORED.format(step=record.step)


def _ratios(record: RolloutRecord) -> tuple[float | None, ...]:
    if record.learner_logprobs is None:
        return (None,) * len(record.tokens)
    pairs = zip(record.sampled, record.learner_logprobs, record.sampler_logprobs, strict=True)
    return tuple(math.exp(min(learner - sampler, 60.0)) if sampled else None for sampled, learner, sampler in pairs)


def _add(columns: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*columns, strict=True)))


def _read_losses(run_folder: Path, step: int) -> dict[str, float]:
    names = ("train/loss", "train/value_loss")
    found = [values for logged, values in read_metrics(run_folder / METRICS_FILE) if logged == step]
    return {name: values[name] for values in found for name in names if name in values}
