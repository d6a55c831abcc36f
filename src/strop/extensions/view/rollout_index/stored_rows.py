"""Some rollouts of one stored step, read in batches of rows, so that a large step is never entirely in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from strop.monitoring.rollout_store.damaged_rollouts import naming_damage
from strop.monitoring.rollout_store.inflated_files import bound_texts, open_parquet
from strop.monitoring.rollout_store.rollout_record import RolloutRecord
from strop.monitoring.rollout_store.rollout_store import RolloutStore, decode_rows

ROWS_AT_ONCE = 64


def read_rows(path: Path, step: int, rows: Sequence[int]) -> list[RolloutRecord]:
    """Read rollouts by their places in the file, in order of place. Raises OSError, DamagedRollouts."""
    if path.suffix != ".parquet":
        records = RolloutStore(path.parents[1], "none").read(step)
        return [records[row] for row in sorted(rows) if row < len(records)]
    with naming_damage(path):
        return decode_rows(row for _, row in _iter_rows(path, rows, None))


def read_values(path: Path, rows: Sequence[int], columns: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Read some columns of rollouts, by their places in the file; columns that the file lacks are missing."""
    if path.suffix != ".parquet":
        wanted = set(rows)
        with path.open(encoding="utf-8") as file:
            lines = {place: json.loads(line) for place, line in enumerate(file) if place in wanted}
        return {place: {name: line[name] for name in columns if name in line} for place, line in lines.items()}
    return dict(_iter_rows(path, rows, columns))


def iter_texts(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yield the columns of a step as Arrow tables of consecutive rows, each with the place of its first row."""
    import pyarrow as pa

    if path.suffix != ".parquet":
        with path.open(encoding="utf-8") as lines:
            place = 0
            while chunk := [json.loads(line) for line in islice(lines, ROWS_AT_ONCE)]:
                yield place, pa.table({name: pa.array([row.get(name) for row in chunk], pa.string()) for name in columns})
                place += len(chunk)
        return
    with open_parquet(path) as file:
        place = 0
        present = [name for name in columns if name in file.schema_arrow.names]
        for batch in file.iter_batches(batch_size=4096, columns=present, use_threads=False):
            yield place, pa.Table.from_batches([batch])
            place += batch.num_rows


def _iter_rows(path: Path, rows: Sequence[int], columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    wanted = sorted(set(rows))
    with open_parquet(path) as file:
        names = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
        first = characters = 0
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=names, use_threads=False):
            here = [row - first for row in wanted if first <= row < first + batch.num_rows]
            for row in here:
                values = batch.slice(row, 1).to_pylist()[0]
                characters = bound_texts(path, values, characters)
                yield first + row, values
            first += batch.num_rows
            if not wanted or first > wanted[-1]:
                return
