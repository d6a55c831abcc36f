"""Opens stored files: a small one cannot fill the memory, and a damaged one is named with what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MAGIC = b"PAR1"  # a parquet file begins and ends with it
_ADVICE = "copy it again if it is a copy, else move it away; the other steps can still be read"


class DamagedRollouts(ValueError):
    """A stored file cannot be read. ``str()`` names its path; ``brief`` only its name."""

    def __init__(self, path: Path, why: str) -> None:
        self.brief = f"{path.name} cannot be read: {why}; {_ADVICE}"
        super().__init__(f"{path} cannot be read: {why}; {_ADVICE}")


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Convert a reader's error for a damaged file into DamagedRollouts. System errors, such as for a missing file, pass."""
    try:
        yield
    except DamagedRollouts:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise DamagedRollouts(path, _find_damage(path) or _describe(error)) from error


def _find_damage(path: Path) -> str:
    """Return visible damage: a file that is empty, truncated, or not parquet; "" if there is none."""
    try:
        size = path.stat().st_size
        if size == 0:
            return "it is empty"
        if path.suffix != ".parquet":
            return ""
        with path.open("rb") as file:
            begins = file.read(4) == _MAGIC
            file.seek(max(0, size - 4))
            ends = file.read(4) == _MAGIC
    except OSError:
        return ""
    if not begins:
        return "it is not a parquet file, or its beginning was overwritten"
    return "" if ends else f"it ends in the middle, after {size} bytes: it was cut off"


def _describe(error: Exception) -> str:
    """The first line of an error, reworded if a column is missing, because then the file has other content."""
    text = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
    if isinstance(error, KeyError) or "FieldRef" in text:
        return "it lacks columns that every step has, so it is no file of stored rollouts, or was changed"
    return f"its contents are damaged ({text or type(error).__name__})"


LARGE, MOST_INFLATED = 2**28, 1000  # decompressed size from which a file may be at most this many times as large as stored
LARGEST_TEXTS = 2**30  # characters of texts in one answer


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Open a file of rollouts; texts are dictionary-encoded, so repeated ones are read once. Raises DamagedRollouts for a
    decompression bomb.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(path)
    size, stored = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)), path.stat().st_size
    if size > LARGE and size > MOST_INFLATED * stored:
        raise DamagedRollouts(path, f"its {stored:,} bytes are {size:,} when they are read, which rollouts never are")
    texts = [field.name for field in metadata.schema.to_arrow_schema() if pa.types.is_string(field.type)]
    with pq.ParquetFile(path, metadata=metadata, read_dictionary=texts) as file:
        yield file


def read_table(path: Path, columns: Sequence[str] | None = None, filters: Any = None) -> Any:
    """Read columns of a file of rollouts as an Arrow table, whose texts are dictionaries: all rows, or those that ``filters`` choose.

    Raises DamagedRollouts for a decompression bomb, including a text repeated by many rows.
    """
    import pyarrow.parquet as pq

    with open_parquet(path) as file:
        table = file.read(columns=None if columns is None else list(columns))
    table = table if filters is None else table.filter(pq.filters_to_expression(filters))
    size = sum(_count_bytes(chunk) for column in table.columns for chunk in column.chunks)
    if size > LARGE and size > MOST_INFLATED * path.stat().st_size:
        raise DamagedRollouts(path, f"its texts are {size:,} bytes when they are read, which those of rollouts never are")
    return table


def _count_bytes(chunk: Any) -> int:
    """Return the size in bytes of the texts of a dictionary-encoded column, counting repetitions."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return (
        (pc.sum(pc.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0) if pa.types.is_dictionary(chunk.type) else 0
    )


def bound_texts(path: Path, row: dict[str, Any], before: int) -> int:
    """Return the total characters of a row's texts and ``before``. Raises DamagedRollouts if it is too large."""
    count = before + sum(len(value) for value in row.values() if isinstance(value, str))
    if count > LARGEST_TEXTS:
        raise DamagedRollouts(path, f"the texts of a few rollouts have more than {LARGEST_TEXTS:,} characters")
    return count
