"""An operator of torch as its profiler writes it: name, time, thread, and the shapes of its inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The profiler's names of number types: bytes of one, and our name.
NUMBER_TYPES: Mapping[str, tuple[int, str]] = {
    "float": (4, "float32"),
    "double": (8, "float64"),
    "c10::BFloat16": (2, "bfloat16"),
    "c10::Half": (2, "float16"),
    "c10::Float8_e4m3fn": (1, "fp8"),
    "c10::Float8_e5m2": (1, "fp8"),
    "long int": (8, "int64"),
    "int": (4, "int32"),
    "short int": (2, "int16"),
    "signed char": (1, "int8"),
    "unsigned char": (1, "uint8"),
    "bool": (1, "bool"),
    "c10::complex<float>": (8, "complex64"),
}
LIST_NUMBER = (4, "float32")  # of a list of tensors, whose type is not recorded: optimizers' states


@dataclass(frozen=True)
class TensorShape:
    """A tensor that an operator reads."""

    shape: tuple[int, ...]
    itemsize: int
    precision: str
    distinct: int  # numbers in memory: a dimension of stride 0 has one

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return self.distinct * self.itemsize


@dataclass(frozen=True)
class OperatorInputs:
    """The arguments of a call: tensors by their places, lists of tensors, and the others as text."""

    tensors: Mapping[int, TensorShape]
    lists: Mapping[int, Sequence[TensorShape]]
    texts: Sequence[str]

    def tensor(self, place: int) -> TensorShape:
        """Return the tensor at a place. Raises KeyError if there is none."""
        return self.tensors[place]

    def text(self, place: int) -> str:
        return self.texts[place] if place < len(self.texts) else ""

    @property
    def every(self) -> list[TensorShape]:
        return [self.tensors[place] for place in sorted(self.tensors)]


def read_inputs(values: Mapping[str, Any]) -> OperatorInputs:
    """Return the inputs of an event's ``args``; none for an event that has no shapes."""
    types, shapes = values.get("Input type") or (), values.get("Input Dims") or ()
    strides = values.get("Input Strides") or [[]] * len(shapes)
    tensors: dict[int, TensorShape] = {}
    lists: dict[int, Sequence[TensorShape]] = {}
    for place, (kind, shape, stride) in enumerate(zip(types, shapes, strides, strict=False)):
        if kind in NUMBER_TYPES:
            tensors[place] = _make_tensor(NUMBER_TYPES[kind], shape, stride)
        elif kind == "TensorList":
            lists[place] = [_make_tensor(LIST_NUMBER, each, ()) for each in shape]
    return OperatorInputs(tensors, lists, values.get("Concrete Inputs") or ())


def _make_tensor(number: tuple[int, str], shape: Sequence[int], stride: Sequence[int]) -> TensorShape:
    known = stride if len(stride) == len(shape) else [1] * len(shape)
    distinct = math.prod(size for size, step in zip(shape, known, strict=True) if step)
    return TensorShape(tuple(shape), *number, distinct if math.prod(shape) else 0)
