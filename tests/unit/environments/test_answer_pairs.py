"""Verdicts over the table of answer pairs: Strop's, and those of the libraries that are installed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from strop.environments.answers import extract_last_boxed, extract_last_boxes, extract_stated_number
from strop.environments.scoring.scoring_pool import ScoringResult
from strop.environments.scoring.scoring_worker import SCORER_LOADERS
from strop.environments.verifiers import math_verifier
from strop.environments.verifiers.math_verifier import extract_stated_choice, find_math_answer, verify_math
from support.answer_pairs import LIBRARIES, OURS, AnswerPair, make_lm_eval, make_math_verify, make_simple_evals, read_answer_pairs
from support.sweep import one_in, sweep

PAIRS, REASONS = read_answer_pairs()
UNMENDED = 14  # rows that Strop decides otherwise than the verdict by hand; docs/evaluation.md explains them


class InThisProcess:
    """The scoring pool without processes of its own: for answers that are not hostile."""

    def __init__(self) -> None:
        self._prepared: dict[str, Callable[..., Callable[[], float]]] = {}

    async def call(self, kind: str, cpu_s: float, **arguments: Any) -> ScoringResult:
        if kind not in self._prepared:
            self._prepared[kind] = SCORER_LOADERS[kind]()
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
