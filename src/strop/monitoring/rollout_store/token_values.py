"""Values of tokens in a record: an array, made from tensors and written to a file without a Python object for each value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from torch import Tensor


class TokenValues(Sequence[Any]):
    """An array that reads as the tuple of its values, and equals it."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    @classmethod
    def join(cls, tensors: Iterable[Tensor], empty: Any) -> TokenValues:
        """Join the values of tensors; without any, the type is ``empty``."""
        return cls(numpy.concatenate([numpy.zeros(0, dtype=empty), *(tensor.numpy() for tensor in tensors)], dtype=empty))

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, place: Any) -> Any:
        return tuple(self.array[place].tolist()) if isinstance(place, slice) else self.array[place].item()

    def __eq__(self, other: object) -> bool:
        return other is self or tuple(self) == (tuple(other) if isinstance(other, TokenValues) else other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __iter__(self) -> Any:
        return iter(self.array.tolist())

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return numpy.asarray(self.array, dtype=dtype)


def make_list_column(values: Sequence[Sequence[Any] | None], type: Any) -> Any:
    """Return the values of records as an Arrow array, list<type>; None is null."""
    import pyarrow as pa

    dtype = type.to_pandas_dtype()
    arrays = [numpy.zeros(0, dtype=dtype), *(numpy.asarray(each, dtype=dtype) for each in values if each is not None)]
    ends = numpy.cumsum([0, *(0 if each is None else len(each) for each in values)]).astype(numpy.int32)
    absent = numpy.array([*(each is None for each in values), False])
    return pa.ListArray.from_arrays(pa.array(ends, mask=absent), pa.array(numpy.concatenate(arrays), type=type))
