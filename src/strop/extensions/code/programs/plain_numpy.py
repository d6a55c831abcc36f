"""What tests use of NumPy to compare plain data, in its place where the sandbox does not have it: the tests of HumanEval+ and MBPP+."""

from __future__ import annotations

import importlib
import math
import sys
from types import ModuleType
from typing import Any


class PlainArray:
    """The type of arrays, of which there are none: values are plain."""


def is_close(first: Any, second: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    if equal_nan and first != first and second != second:
        return True
    if math.inf in (abs(first), abs(second)):
        return bool(first == second)
    return bool(abs(first - second) <= atol + rtol * abs(second))


def all_close(first: Any, second: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Compare numbers, or lists of them of one shape; a number and a list: it with each."""
    for value in (first, second):
        if not isinstance(value, list | tuple | int | float | complex):
            raise TypeError(f"{type(value).__name__} {value!r:.80} is no number")
    if not isinstance(first, list | tuple):
        if not isinstance(second, list | tuple):
            return is_close(first, second, rtol, atol, equal_nan)
        first = [first] * len(second)
    if not isinstance(second, list | tuple):
        second = [second] * len(first)
    if len(first) != len(second):
        raise ValueError(f"the lengths {len(first)} and {len(second)} differ")
    return all(all_close(one, other, rtol, atol, equal_nan) for one, other in zip(first, second, strict=True))


def assert_all_close(
    actual: Any, desired: Any, rtol: float = 1e-07, atol: float = 0, equal_nan: bool = True, **more: Any
) -> None:
    assert all_close(actual, desired, rtol, atol, equal_nan), f"{actual!r:.100} is not close to {desired!r:.100}"


def offer_numpy() -> None:
    """Let ``import numpy`` find these functions where there is no NumPy."""
    try:
        importlib.import_module("numpy")
    except ImportError:
        module, testing = ModuleType("numpy"), ModuleType("numpy.testing")
        for name, value in {
            "ndarray": PlainArray,
            "float64": float,
            "float32": float,
            "inf": math.inf,
            "nan": math.nan,
            "isclose": is_close,
            "allclose": all_close,
            "testing": testing,
        }.items():
            setattr(module, name, value)
        testing.assert_allclose = assert_all_close  # type: ignore[attr-defined]
        sys.modules["numpy"], sys.modules["numpy.testing"] = module, testing
