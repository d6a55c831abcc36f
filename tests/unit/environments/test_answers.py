"""Finding final answers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.environments.answers import (
    extract_final_answer,
    extract_last_boxed,
    extract_last_number,
    extract_last_tagged,
    normalize_answer,
)
from support.sweep import one_in


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
        (r"\boxed{3} and \boxed{4", ""),
        (r"\boxed{3} and \fbox {4}.", "4"),
        (r"\boxed {3}", "3"),
        (r"\boxed{1 + \boxed{2}}", "2"),
        (r"\boxed{}", ""),
        ("no box", None),
        (r"\boxed{", ""),
    ],
)
def test_the_last_box_counts_and_is_empty_if_it_was_cut_off(text, boxed):
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


# --- hostile texts -----------------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[str], object]] = {
    "number": extract_last_number,
    "boxed": extract_last_boxed,
    "final": extract_final_answer,
    "tagged": lambda text: extract_last_tagged(text, "answer"),
    "normal": normalize_answer,
}
HOSTILE = (
    "\\boxed{", "{", "}{", "{}", "\\boxed{}", "<answer>", "answer is", "answer is:\n", "answer\n", "####", "#", "answer:",
    "\n", " \t", "9", "1,", "1,111", "-", "1.", "\\frac{1", "\\text{", "\\left\\ ", "$", ".", "/1",
)  # fmt: skip


def seconds(read: Callable[[str], object], text: str) -> float:
    def once() -> float:
        started = time.process_time()
        read(text)
        return time.process_time() - started

    return min(once() for _ in range(3))


@pytest.mark.parametrize("unit", one_in(4, HOSTILE))
def test_ten_times_the_text_takes_ten_times_as_long(unit: str) -> None:
    """For every pattern that runs on a model's text: what is quadratic takes a hundred times as long."""
    for name, read in READERS.items():
        for make in (lambda size: unit * (size // len(unit)), lambda size: "answer is" + unit * (size // len(unit)) + "!"):
            short, long = seconds(read, make(10_000)), seconds(read, make(100_000))
            assert long < 30 * short + 0.01, (name, short, long)


def boxed_by_the_definition(text: str) -> str | None:
    """The last box that was opened, in quadratic time; empty if it was never closed."""
    start, word = max((text.rfind(word), word) for word in ("\\boxed{", "\\fbox{"))
    if start < 0:
        return None
    begin = start + len(word)
    ends = (
        end for end in range(begin, len(text)) if text[end] == "}" and text.count("{", begin, end) == text.count("}", begin, end)
    )
    return text[begin : next(ends, begin)].strip()


STATED = re.compile(r"(?:####|answer\s+is\s*:?|answer\s*:)\s*(.+)", re.IGNORECASE)
PIECES = st.sampled_from([
    "\\boxed{", "\\fbox{", "{", "}", "12", "x", " ", "\n", "answer", "Answer is", ":", "####", ",", "-3", "<answer>",
    "</answer>", "\\frac{1}{2}",
])  # fmt: skip


@given(st.lists(PIECES, max_size=24).map("".join))
def test_answers_are_those_of_the_definition(text: str) -> None:
    assert extract_last_boxed(text) == boxed_by_the_definition(text)
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    assert extract_last_tagged(text, "answer") == (tagged[-1].strip() if tagged else None)
    if extract_last_boxed(text) is None and (stated := STATED.findall(text)):
        assert extract_final_answer(text) == stated[-1].strip()
