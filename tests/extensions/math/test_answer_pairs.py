"""Verdicts over the table of answer pairs: Strop's, and those of the libraries that are installed."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.environments.answers import (
    extract_final_answer,
    extract_last_boxed,
    extract_last_boxes,
    extract_last_number,
    extract_last_tagged,
    extract_stated_number,
    normalize_answer,
)
from strop.environments.scoring.scoring_pool import ScoringResult
from strop.extensions.math import math_verifier
from strop.extensions.math.math_verifier import extract_stated_choice, find_math_answer, verify_math
from strop.user_code import import_attribute
from support.answer_pairs import LIBRARIES, OURS, AnswerPair, make_lm_eval, make_math_verify, make_simple_evals, read_answer_pairs
from support.sweep import one_in, sweep

PAIRS, REASONS = read_answer_pairs()
UNMENDED = 14  # rows that Strop decides otherwise than the verdict by hand; docs/evaluation.md explains them


class InThisProcess:
    """The scoring pool without processes of its own: for answers that are not hostile."""

    def __init__(self) -> None:
        self._prepared: dict[str, Callable[..., Callable[[], float]]] = {}

    async def call(self, kind: str, cpu_s: float, *, loader: str, **arguments: Any) -> ScoringResult:
        if kind not in self._prepared:
            self._prepared[kind] = import_attribute(loader)()
        return ScoringResult(self._prepared[kind](**arguments)())


def decide(pair: AnswerPair) -> ScoringResult:
    options = {"num_workers": 2, "timeout_s": 1.0}
    return asyncio.run(verify_math(pair.method, pair.reference, pair.text, pair.row, **options))  # type: ignore[arg-type]


def find_false_claims(name: str, verdicts: list[tuple[AnswerPair, bool]]) -> list[str]:
    """Return the rows of which the table says something else than what was decided."""
    return [
        f"{pair}: {'right' if right else 'wrong'}, and the table says otherwise"
        for pair, right in verdicts
        if (right != pair.right) != (name in pair.differs)
    ]


def test_the_table_has_every_method_and_a_reason_for_each_difference() -> None:
    assert len(PAIRS) >= 400 and len({(pair.method, pair.text, pair.reference, str(pair.row)) for pair in PAIRS}) == len(PAIRS)
    assert {pair.method for pair in PAIRS} == set(math_verifier.MathMethod.__args__)  # type: ignore[attr-defined]
    used = {(name, reason) for pair in PAIRS for name, reason in pair.differs.items()}
    assert used == {(name, reason) for name, reasons in REASONS.items() for reason in reasons}
    assert all(name == OURS or name in LIBRARIES[pair.method] for pair in PAIRS for name in pair.differs)
    assert min(Counter(pair.right for pair in PAIRS if pair.method == method)[False] for method in LIBRARIES) >= 10


@pytest.mark.parametrize("step", sweep([1, 3], 3))
def test_each_row_is_decided_as_by_hand_or_the_table_says_why_not(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = InThisProcess()
    monkeypatch.setattr(math_verifier, "get_scoring_pool", lambda size: pool)
    verdicts = [(pair, bool(decide(pair).value)) for pair in PAIRS[::step] if not pair.hostile]
    assert find_false_claims(OURS, verdicts) == []
    assert sum(OURS in pair.differs for pair in PAIRS) == UNMENDED


@pytest.mark.exhaustive
def test_the_default_method_decides_boxes_as_the_method_that_reads_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = InThisProcess()
    monkeypatch.setattr(math_verifier, "get_scoring_pool", lambda size: pool)
    pairs = [replace(pair, method="math_verify") for pair in PAIRS if pair.method == "boxed" and not pair.hostile]
    boxed = [pair for pair in pairs if extract_last_boxed(pair.text) is not None]
    assert len(boxed) > 100 and find_false_claims(OURS, [(pair, bool(decide(pair).value)) for pair in boxed]) == []


def test_hostile_rows_are_decided_within_the_limits_of_the_scoring_pool() -> None:
    async def decide_all() -> list[ScoringResult]:
        options = {"num_workers": 1, "timeout_s": 0.2}
        waiting = [verify_math(pair.method, pair.reference, pair.text, pair.row, **options) for pair in hostile]  # type: ignore[arg-type]
        return list(await asyncio.gather(*waiting))

    hostile = [pair for pair in PAIRS if pair.hostile]
    results = asyncio.run(decide_all())
    assert len(hostile) >= 5 and not any(result.value for result in results)
    assert find_false_claims(OURS, [(pair, bool(result.value)) for pair, result in zip(hostile, results, strict=True)]) == []


def test_each_right_row_has_a_vote_unless_it_has_no_answer_to_find() -> None:
    for pair in PAIRS:
        if pair.right and OURS not in pair.differs:
            assert find_math_answer(pair.method, pair.text, pair.row), str(pair)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param("math_verify", make_math_verify, marks=pytest.mark.exhaustive),
        ("simple_evals", make_simple_evals),
        ("lm_eval", make_lm_eval),
    ],
)
def test_what_the_table_says_of_a_library_is_so(name: str, make: Callable[[], Callable[[AnswerPair], bool] | None]) -> None:
    decide_as = make()
    if decide_as is None:
        pytest.skip(f"{name} is not installed")
    asked = [pair for pair in PAIRS if name in LIBRARIES.get(pair.method, ()) and not pair.hostile]
    assert find_false_claims(name, [(pair, decide_as(pair)) for pair in asked]) == []


@pytest.mark.parametrize(
    "text", one_in(3, ["Answer: ", "\\boxed{", "\\boxed{A}", "answer ", "answer is ", "\\boxed{A}\n", "1,", "{,}", "####"])
)
def test_what_is_extracted_in_the_event_loop_takes_linear_time(text: str) -> None:
    for extract in (extract_stated_choice, extract_last_boxes, extract_stated_number):
        started = time.process_time()
        extract(text * 40_000)
        assert time.process_time() - started < 2, extract.__name__


# --- Finding final answers ----------------------------------------------------------------------------------------------------


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
