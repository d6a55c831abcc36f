"""Stored files opened so that a small one cannot fill the memory: what is compressed, or repeated, is bounded before it is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strop.monitoring.rollout_store.damaged_rollouts import DamagedRollouts

LARGE, MOST_INFLATED = 2**28, 1000  # bytes of a file as it is read, from which on it may be so many times as long as it is stored
LARGEST_TEXTS = 2**30  # characters of the texts of one answer


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Open a file of rollouts; texts are read as dictionaries, a repeated one once. Raises DamagedRollouts for one that was inflated."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(path)
    size, stored = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)), path.stat().st_size
    if size > LARGE and size > MOST_INFLATED * stored:
        raise DamagedRollouts(path, f"its {stored:,} bytes are {size:,} when they are read, which rollouts never are")
    texts = [field.name for field in metadata.schema.to_arrow_schema() if pa.types.is_string(field.type)]
    with pq.ParquetFile(path, metadata=metadata, read_dictionary=texts) as file:
        yield file


def bound_texts(path: Path, row: dict[str, Any], before: int) -> int:
    """Return how many characters the texts of a row have with those ``before``. Raises DamagedRollouts where that is too much."""
    count = before + sum(len(value) for value in row.values() if isinstance(value, str))
    if count > LARGEST_TEXTS:
        raise DamagedRollouts(path, f"the texts of a few rollouts have more than {LARGEST_TEXTS:,} characters")
    return count
