"""What the processes that score answers load: a function of the arguments of one answer, which returns one that scores it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from strop.environments.scoring.scoring_worker import UnparsableReference
from strop.extensions.math import math_equality
from strop.extensions.math.dapo_verifier import normalize_dapo_answer, score_dapo
from strop.extensions.math.math_equality import are_equal, parse, prepare

ReportedMethod = Literal["boxed", "olympiad", "minerva"]

EXACT = 1e-8  # OlympiadBench's tolerance if a problem gives none
MINERVA_TOLERANCE = 1e-4  # relative

_UNIT = re.compile(r"(?:\\[,;:! ]|~|\s)*\\(?:text|textrm|mathrm|mbox|operatorname)\{[^{}]*\}(?:\^\{?-?\d+\}?)?[.\s]*$")


def prepare_reported_math(
    method: ReportedMethod, reference: str, answer: str, tolerances: Sequence[float] = (EXACT,)
) -> Callable[[], float]:
    match method:
        case "olympiad":
            return partial(score_olympiad, reference, answer, tolerances)
        case "minerva":
            return partial(score_minerva, reference, answer)
    return partial(score_equality, reference, answer)


def score_equality(reference: str, answer: str) -> float:
    return float(are_equal(reference, answer))


def score_olympiad(reference: str, answer: str, tolerances: Sequence[float]) -> float:
    """Return 1 if every answer of the reference is given, in any order, and no other. Numbers may differ by an absolute tolerance."""
    expected, given = split_answers(reference), split_answers(answer)
    if len(expected) != len(given):
        return score_equality(reference, answer)
    limits = list(tolerances) if len(tolerances) == len(expected) else [tolerances[0]] * len(expected)
    for each, limit in zip(expected, limits, strict=True):
        found = next((one for one in given if _equals_within(each, one, limit)), None)
        if found is None:
            return 0.0
        given.remove(found)
    return 1.0


def score_minerva(reference: str, answer: str) -> float:
    """Return 1 if the answers are equal after Minerva's normalization, as numbers within a relative 1e-4, or according to SymPy."""
    if normalize_dapo_answer(reference) == normalize_dapo_answer(answer):
        return 1.0
    wanted, given = evaluate_number(reference), evaluate_number(answer)
    if wanted is not None and given is not None:
        return float(abs(wanted - given) <= MINERVA_TOLERANCE * max(abs(wanted), abs(given)))
    return score_equality(reference, answer)


def split_answers(text: str) -> list[str]:
    """Split at the commas outside of brackets, and each plus-minus in two."""
    text = prepare(text)
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in ",;" and text[index - 1 : index] != "\\":
            parts.append(text[start:index])
            start = index + 1
    parts.append(text[start:])
    parts = [part for each in parts for part in re.split(r"\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b", each)]
    signed = [part.replace("\\pm", sign) for part in parts for sign in ("+", "-")[: 1 + ("\\pm" in part)]]
    return [part.strip() for part in signed if part.strip()]


def evaluate_number(text: str) -> float | None:
    """Return the value of a number or of an expression without symbols, else None. A unit is left out."""
    text = strip_unit(prepare(text))
    for parsed in parse(text):
        value = _evaluate(getattr(parsed, "rhs", parsed))
        if value is not None:
            return value
    return None


def strip_unit(text: str) -> str:
    """Drop the words at the end of a quantity."""
    while (short := _UNIT.sub("", text)) != text and short.strip():
        text = short
    return text


def _equals_within(expected: str, given: str, tolerance: float) -> bool:
    if expected == given or are_equal(expected, given):
        return True
    wanted, found = evaluate_number(expected), evaluate_number(given)
    return wanted is not None and found is not None and abs(wanted - found) <= 1.01 * tolerance


def _evaluate(expression: Any) -> float | None:
    try:
        number = complex(expression.doit().evalf())
    except (AttributeError, TypeError, ValueError, OverflowError):  # a text, a set, or an expression with symbols
        return None
    return number.real if math.isfinite(number.real) and number.imag == 0 else None


# Scored once before the first fork, so that every child has the parser's tables and SymPy's lazy imports.
WARM_UP = (
    ("\\frac{1}{2}", "0.51"),
    ("2x", "x+x+1"),
    ("x^2", "\\sqrt{x}\\sin(x)"),
    ("(1,2]", "[1,3)"),
    ("\\{1,2\\}", "1,2,3"),
    ("x<3", "x>3"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\3\\end{pmatrix}"),
    ("\\text{even}", "\\text{odd}"),
    ("50\\%", "12 \\text{ cm}"),
    ("2\\pi", "6.28^{\\circ}"),
)


def load_math_verify() -> Callable[..., Callable[[], float]]:
    def prepare(reference: str, answer: str) -> Callable[[], float]:
        def score() -> float:
            if not math_equality.prepare(reference):
                raise UnparsableReference(f"the reference answer {reference!r:.200} cannot be parsed")
            return math_equality.score_reply(reference, answer)

        return score

    for reference, answer in WARM_UP:
        prepare(reference, f"\\boxed{{{answer}}}")()
    prepare("1", "It is 2")()
    return prepare


def load_reported_math() -> Callable[..., Callable[[], float]]:
    for reference, answer in WARM_UP:
        prepare_reported_math("boxed", reference, answer)()
    return prepare_reported_math


def load_dapo() -> Callable[..., Callable[[], float]]:
    return lambda reference, answer: partial(score_dapo, reference, answer)
