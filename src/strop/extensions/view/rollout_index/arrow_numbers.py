"""Arrow columns as numpy arrays, without pandas: pyarrow's own conversion imports it, which takes a second."""

from __future__ import annotations

from typing import Any

import numpy as np


def to_numbers(column: Any, kind: Any) -> np.ndarray:
    """Return a column of numbers or booleans as an array of type ``kind``, [N]. Nulls become NaN; a ``kind`` without NaN must
    have none.
    """
    array = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if hasattr(array, "chunks"):
        array = array.chunk(0)
    if not len(array):
        return np.empty(0, kind)
    stored = np.dtype(np.uint8 if kind is np.bool_ else kind)
    array = array.cast(str(stored).replace("float64", "double"))
    if array.null_count:
        array = array.fill_null(float("nan"))
    found: np.ndarray = np.frombuffer(array.buffers()[1], dtype=stored, count=len(array), offset=array.offset * stored.itemsize)
    return found.astype(kind)


def from_numbers(values: np.ndarray) -> Any:
    """Return an array as an Arrow column, [N]; booleans as 0 and 1."""
    import pyarrow as pa

    stored = np.ascontiguousarray(values.astype(np.uint8) if values.dtype == np.bool_ else values)
    kind = pa.type_for_alias(str(stored.dtype).replace("float64", "double"))
    return pa.Array.from_buffers(kind, len(stored), [None, pa.py_buffer(stored)])


def release_memory() -> None:
    """Return the memory that Arrow keeps of read files to the system."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
