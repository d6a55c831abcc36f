"""What stands in for NumPy in the sandbox says what NumPy says."""

from __future__ import annotations

import math
import sys

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.extensions.code.programs.checker import all_close, assert_all_close, is_close, offer_numpy

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32) | st.integers(-1000, 1000)


@given(NUMBERS, NUMBERS, st.sampled_from([0.0, 1e-6, 0.5]), st.booleans())
def test_numbers_are_close_as_numpy_says(first, second, atol, equal_nan) -> None:
    assert is_close(first, second, atol=atol, equal_nan=equal_nan) == numpy.isclose(first, second, atol=atol, equal_nan=equal_nan)


@given(st.lists(st.floats(-1, 1), max_size=4), st.floats(0, 1e-5))
def test_lists_are_close_as_numpy_says(values, shift) -> None:
    moved = [value + shift for value in values]
    assert all_close(moved, values) == numpy.allclose(moved, values)
    assert all_close(moved, 0.5) == numpy.allclose(moved, 0.5)


def test_lists_of_other_lengths_and_shapes_are_not_compared() -> None:
    with pytest.raises(ValueError, match="the lengths 2 and 3 differ"):
        all_close([1, 2], [1, 2, 3])
    assert all_close([[1.0], [2.0]], [[1.0], [2.0 + 1e-9]])
    with pytest.raises(AssertionError, match="is not close to"):
        assert_all_close([1.0], [1.1])
    assert not is_close(math.inf, -math.inf) and is_close(math.inf, math.inf)


def test_numpy_itself_is_taken_where_it_is(monkeypatch) -> None:
    offer_numpy()
    assert sys.modules["numpy"] is numpy
    monkeypatch.setitem(sys.modules, "numpy", None)  # an import of it fails
    offer_numpy()
    assert sys.modules["numpy"].allclose is all_close
