"""Whether the content of a ``\\boxed`` is the reference answer, as the papers of an evaluation set decide it; for ``scoring_worker.py``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from strop.environments.scoring.dapo_verifier import normalize_dapo_answer

ReportedMethod = Literal["boxed", "olympiad", "minerva"]

EXACT = 1e-8  # OlympiadBench's tolerance where a problem names none
MINERVA_TOLERANCE = 1e-4  # relative

_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)[eE]([+-]?\d+)")
_UNIT = re.compile(r"(?:\\[,;:! ]|~|\s)*\\(?:text|textrm|mathrm|mbox|operatorname)\{[^{}]*\}(?:\^\{?-?\d+\}?)?[.\s]*$")
_REPEATING = re.compile(r"(\d{0,50})\.(\d{0,50})\\overline\{(\d{1,50})\}")
_BASED = re.compile(r"(\w+)_\{?(\d+)\}?")  # a number and its base


def prepare_reported_math(
    method: ReportedMethod, reference: str, answer: str, tolerances: Sequence[float] = (EXACT,)
) -> Callable[[], float]:
    match method:
        case "olympiad":
            return partial(score_olympiad, reference, answer, tolerances)
        case "minerva":
            return partial(score_minerva, reference, answer)
    return partial(score_boxed, reference, answer)


def score_boxed(reference: str, answer: str) -> float:
    """Return 1 if math-verify says that the answer is the reference. Numbers of two bases are never equal."""
    based = _BASED.fullmatch(_clean(reference)), _BASED.fullmatch(_clean(answer))
    if based[0] and based[1]:
        return float(based[0].groups() == based[1].groups())
    return float(_verify(reference, answer))


def score_olympiad(reference: str, answer: str, tolerances: Sequence[float]) -> float:
    """Return 1 if every answer of the reference is given, in any order, and no other. Numbers may differ by an absolute tolerance."""
    expected, given = split_answers(reference), split_answers(answer)
    if len(expected) != len(given):
        return float(_verify(reference, answer))
    limits = list(tolerances) if len(tolerances) == len(expected) else [tolerances[0]] * len(expected)
    for each, limit in zip(expected, limits, strict=True):
        found = next((one for one in given if _equals_within(each, one, limit)), None)
        if found is None:
            return 0.0
        given.remove(found)
    return 1.0


def score_minerva(reference: str, answer: str) -> float:
    """Return 1 if the answers are equal after Minerva's normalization, as numbers within a relative 1e-4, or for SymPy."""
    if normalize_dapo_answer(reference) == normalize_dapo_answer(answer):
        return 1.0
    wanted, given = evaluate_number(reference), evaluate_number(answer)
    if wanted is not None and given is not None:
        return float(abs(wanted - given) <= MINERVA_TOLERANCE * max(abs(wanted), abs(given)))
    return float(_verify(reference, answer))


def split_answers(text: str) -> list[str]:
    """Split at the commas outside of brackets, and each plus-minus in two."""
    text = _clean(text)
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
    text = strip_unit(_clean(text))
    if found := _SCIENTIFIC.fullmatch(text.replace(",", "")):
        return float(found[0])
    for parsed in _parse(text):
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
    if expected == given or _verify(expected, given):
        return True
    wanted, found = evaluate_number(expected), evaluate_number(given)
    return wanted is not None and found is not None and abs(wanted - found) <= 1.01 * tolerance


def _verify(reference: str, answer: str) -> bool:
    """Return what math-verify says. Letters are units only beside numbers: it would read the h of ``\\nu h`` as hours, too."""
    from math_verify import verify  # type: ignore[import-untyped,unused-ignore]

    options = {"allow_set_relation_comp": True, "timeout_seconds": None}
    if verify(_parse(reference, units=False), _parse(answer, units=False), **options):
        return True
    expected, given = _parse(reference), _parse(answer)
    symbolic = any(getattr(each, "free_symbols", None) for each in (*expected, *given))
    return not symbolic and bool(verify(expected, given, **options))


def _parse(text: str, *, units: bool = True) -> list[Any]:
    from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped,unused-ignore]
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    normalization = NormalizationConfig(basic_latex=True, units=units, malformed_operators=True, nits=True, boxed="all")
    config = [LatexExtractionConfig(normalization_config=normalization), ExprExtractionConfig()]
    text = _REPEATING.sub(_write_as_fraction, text.replace("°", "^\\circ"))
    found: list[Any] = parse(f"\\boxed{{{text}}}", config, parsing_timeout=None)  # the worker enforces the limits
    return found


def _write_as_fraction(decimal: re.Match[str]) -> str:
    whole, fixed, repeated = decimal[1] or "0", decimal[2], decimal[3]
    numerator = int(whole + fixed + repeated) - int(whole + fixed)
    return f"\\frac{{{numerator}}}{{{'9' * len(repeated) + '0' * len(fixed)}}}"


def _evaluate(expression: Any) -> float | None:
    try:
        number = complex(expression.doit().evalf())
    except (AttributeError, TypeError, ValueError, OverflowError):  # a text, a set, or an expression with symbols
        return None
    return number.real if math.isfinite(number.real) and number.imag == 0 else None


def _clean(text: str) -> str:
    """Drop what says nothing: dollar signs, sizes of brackets, spaces of LaTeX, a full stop."""
    text = re.sub(r"\\(?:left|right|displaystyle|,|;|!|:|quad|qquad)(?![A-Za-z])|\$", "", text.replace("\\$", ""))
    return text.strip().removesuffix(".").strip()
