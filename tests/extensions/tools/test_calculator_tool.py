"""The calculator."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.extensions.tools.calculator_tool import CALCULATOR, LONGEST, calculate
from strop.tools.base import ToolError


def value(expression: str) -> str:
    return asyncio.run(calculate(expression))


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "1/3 ≈ 0.333333333333333333333333333333"),
        ("-7 / 4", "-1.75"),
        ("2^10 - 2**3", "1016"),
        ("-2^2", "-4"),
        ("2^-2", "0.25"),
        ("4^(1/2)", "2"),
        ("1,234,567 × 2 ÷ 2", "1234567"),
        ("12.5% * 80", "10"),
        ("17 % 5", "2"),
        ("17 // 5 =", "3"),
        ("sqrt(144) + sqrt(2.25)", "13.5"),
        ("sqrt(2)", "≈ 1.4142135623731"),
        ("factorial(20)", "2432902008176640000"),
        ("gcd(12, 18) + lcm(4, 6) + comb(5, 2)", "28"),
        ("max(1, 2.5) - min(3, 1)", "1.5"),
        ("round(2.675, 2)", "2.68"),
        ("log(100) + ln(e) + log2(8)", "≈ 6"),
        ("0^0 + (-1)^1000001", "0"),
    ],
)
def test_arithmetic_is_exact(expression: str, result: str) -> None:
    assert value(expression) == result or value(expression).startswith(result)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("9**9**9", "more than 3000 digits"),
        ("factorial(100000)", "too large here"),
        ("comb(10^9, 5*10^8)", "too large here"),
        ("(10^2000)^2", "more than 3000 digits"),
        ("exp(1000)", "cannot be computed"),
        ("1e99999", "too large"),
        ("1 / 0", "division by zero"),
        ("0^-1", "division by zero"),
        ("(-8)^(1/3)", "not a real number"),
        ("sqrt(-1)", "not a real number"),
        ("2 +", "no arithmetic expression"),
        ("", "no arithmetic expression"),
        ("__import__('os').system('id')", "is not supported"),
        ("(1).__class__", "is not supported"),
        ("[1, 2]", "is not supported"),
        ("'a' * 9", "is not supported"),
        ("True", "is not supported"),
        ("sqrt()", "cannot be computed"),
        ("factorial(2.5)", "not a whole number"),
        ("1" * (LONGEST + 1), "at most 500"),
        ("(" * 300 + "1" + ")" * 100, "no arithmetic expression|cannot be computed"),
        ("-" * 499 + "1", ""),
    ],
)
def test_what_cannot_be_computed_is_said(expression: str, words: str) -> None:
    started = time.perf_counter()
    if words:
        with pytest.raises(ToolError, match=words):
            value(expression)
    else:
        value(expression)
    assert time.perf_counter() - started < 1


@given(st.text("0123456789.+-*/^()% ,esqrtlogpi", max_size=60))
def test_any_text_has_a_value_or_an_error_that_is_told(text: str) -> None:
    try:
        assert value(text)
    except ToolError as error:
        assert str(error)


def test_it_is_a_tool_of_one_argument() -> None:
    assert CALCULATOR.function is calculate and CALCULATOR.parameters["required"] == ["expression"]
