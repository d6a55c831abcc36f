"""Cases that are looped over in one test: all run, and those that fail are named."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from support.each import each


def test_every_case_runs_and_each_that_fails_is_named_with_its_own_error() -> None:
    ran = []

    @each("number", [1, 2, 3, 4], ids=["one", "two", "three", "four"])
    def is_odd(tmp_path: Path, number: int) -> None:
        ran.append(number)
        assert number % 2, f"{number} is even"

    assert list(inspect.signature(is_odd).parameters) == ["tmp_path"], "fixtures stay"
    with pytest.raises(ExceptionGroup, match="2 of 4 cases of number") as caught:
        is_odd(tmp_path=Path())
    assert ran == [1, 2, 3, 4]
    assert [error.__notes__ for error in caught.value.exceptions] == [["number = two"], ["number = four"]]
    assert all("is even" in str(error) for error in caught.value.exceptions)


def test_several_names_are_given_by_place_and_loops_nest() -> None:
    @each("letter", "ab")
    @each("left, right", [(1, 2), (3, 3)], ids=str)
    def differ(letter: str, left: int, right: int) -> None:
        assert left != right, letter

    with pytest.raises(ExceptionGroup) as caught:
        differ()
    assert [error.__notes__ for error in caught.value.exceptions] == [["letter = a"], ["letter = b"]]


def test_a_test_is_skipped_where_all_of_its_cases_are() -> None:
    @each("number", [1, 2])
    def odd_alone(number: int) -> None:
        if number % 2 == 0:
            pytest.skip("even")

    @each("number", [1, 2])
    def neither(number: int) -> None:
        pytest.skip("none of them")

    odd_alone()
    with pytest.raises(pytest.skip.Exception, match="none of them"):
        neither()
