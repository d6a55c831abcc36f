"""Finding final answers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.environments.answers import extract_final_answer, extract_last_boxed, extract_last_number, normalize_answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7", 7),
        ("3 + 4 = 7.", 7),
        ("It is 1,234,567!", 1234567),
        ("7.50 dollars", Fraction(15, 2)),
        ("5 - 8 = -3", -3),
        ("minus: \u22123", -3),
        ("7 = 10-3", 3),
        ("(2)-3", 3),
        ("1,2", 2),
        ("**12**", 12),
        ("", None),
        ("none", None),
    ],
)
def test_the_last_number_is_found(text, number):
    assert extract_last_number(text) == number


@given(st.integers(-(10**12), 10**12), st.text(alphabet="abc =:.\n", max_size=10))
def test_any_integer_at_the_end_is_found(value, before):
    assert extract_last_number(f"{before} {value}") == value
    assert extract_last_number(f"{before} {value:,}.") == value


@given(st.text(max_size=200))
def test_no_text_breaks_the_extraction(text):
    extract_last_number(text)
    answer = extract_final_answer(text)
    if answer is not None:
        normalize_answer(answer)


def test_a_number_of_thousands_of_digits_is_no_error():
    assert extract_last_number("9" * 10_000) is None
    assert normalize_answer("9" * 10_000) == "9" * 10_000


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed{}", ""),
        ("no box", None),
        (r"\boxed{", None),
    ],
)
def test_the_last_closed_box_counts(text, boxed):
    assert extract_last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"I think 5. \boxed{6} 7", "6"),
        ("The answer is 12 apples.", "12 apples."),
        ("work 3 + 4\n#### 7", "7"),
        ("first 3, then 8", "8"),
        ("hello", None),
    ],
)
def test_the_final_answer_is_boxed_or_stated_or_the_last_number(text, answer):
    assert extract_final_answer(text) == answer


@pytest.mark.parametrize("written", ["1/2", "0.5", "0.50", r"\frac{1}{2}", r"\dfrac{1}{2}", "$2/4$", " 1/2. "])
def test_equal_rationals_have_one_form(written):
    assert normalize_answer(written) == "1/2"


def test_spelling_is_normalised_and_meaning_is_not():
    assert normalize_answer(r"\left( 3, 4 \right)") == normalize_answer("(3,4)") == "(3,4)"
    assert normalize_answer("1,234") == "1234"
    assert normalize_answer(r"\text{Yes}") == "Yes"
    assert normalize_answer("1/0") == "1/0"
    assert normalize_answer("50\\%") != normalize_answer("50")
