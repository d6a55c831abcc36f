"""What the processes that score answers load: whether answers are equal, and functions of one answer's arguments that return its scorer.

Every method other than text comparison uses ``are_equal``. Cases that math-verify alone gets wrong are decided here, once:
notation it does not read, texts it reads only in part, and small numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from strop.environments.answers import extract_final_answer, extract_last_boxed, normalize_answer
from strop.environments.scoring.scoring_worker import UnparsableReference
from strop.extensions.math.dapo_verifier import normalize_dapo_answer, score_dapo

LEAST_DIGITS = 1e-5  # relative tolerance of numbers if one is a decimal; math-verify compares six decimal places
PRECISION = 30  # digits used to evaluate expressions for it

_SIGNS = str.maketrans(
    {
        **{"−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "\\div ", "√": "\\sqrt "},
        **{
            "≤": "\\le ",
            "≥": "\\ge ",
            "≠": "\\ne ",
            "±": "\\pm ",
            "∞": "\\infty ",
            "∪": "\\cup ",
            "∩": "\\cap ",
            "∅": "\\emptyset ",
        },
        **{
            "π": "\\pi ",
            "θ": "\\theta ",
            "°": "^\\circ ",
            "²": "^{2}",
            "³": "^{3}",
            "％": "\\%",
            "，": ",",
            "（": "(",
            "）": ")",
        },
        **{"½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "⅓": "\\frac{1}{3}", "⅔": "\\frac{2}{3}"},
        **{"…": "\\ldots ", "⟨": "\\langle ", "⟩": "\\rangle "},
    }
)
_LITTLE = re.compile(r"\\(?:left|right|displaystyle|,|;|!|:|quad|qquad)(?![A-Za-z])|(?<!\\)\$")
_WORDS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^(?:=|≈|\\approx|\\sim|\\simeq|\\therefore)(?![A-Za-z])\s*"), ""),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\l?angle\s*(?=[^\\A-Z]*,.*\\rangle)|\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(r"\\[lcv]?dots(?![A-Za-z])|\.\.\."), r"\\ldots"),
    (re.compile(r"[€£¥₹₩]"), ""),
    (re.compile(r"(?<=[\d})])\s*[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]+$"), ""),  # a unit: 12元, 5 平方厘米
    (re.compile(r"(?<=\d)[ ~](?=\d{3}(?!\d))"), ""),  # 1 000
    (re.compile(r"(?<![\w.}/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/])"), r"\1\\frac{\2}{\3}"),  # 1 3/4
    (re.compile(r"(?<![\w.\\}])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?![\w.])"), r"\1\\times 10^{\2}"),  # 6.6e-34
)
_REPEATING = re.compile(r"(\d{0,50})\.(\d{0,50})\\(?:overline|bar|dot)\{(\d{1,50})\}")
_BASED = re.compile(r"\(?([0-9A-Fa-f]+)\)?_\{?(\d+)\}?")  # a number and its base


def score_reply(reference: str, reply: str) -> float:
    """1 if the last box of a reply equals the reference, or without a box the expression that math-verify finds in it; otherwise
    0.
    """
    if (boxed := extract_last_boxed(reply)) is not None:
        return float(are_equal(reference, boxed))
    if not (expected := parse(prepare(reference))):
        return float(are_equal(reference, extract_final_answer(reply) or ""))
    from math_verify import parse as parse_with_math_verify  # type: ignore[import-untyped,unused-ignore]

    return float(verify(expected, parse_with_math_verify(reply.translate(_SIGNS), parsing_timeout=None)))


def are_equal(reference: str, answer: str) -> bool:
    """Whether two expressions are equal. A text that is not completely parsed equals only itself, up to meaningless notation."""
    reference, answer = prepare(reference), prepare(answer)
    if (normal := normalize_answer(reference)) == normalize_answer(answer):
        return bool(normal)
    based = _BASED.fullmatch(reference), _BASED.fullmatch(answer)
    if based[0] and based[1]:
        return based[0].groups() == based[1].groups()
    expected, given = parse(reference, units=False), parse(answer, units=False)
    if verify(expected, given):
        return True
    # Letters are units only next to numbers: otherwise the h of \nu h would be read as hours.
    expected, given = parse(reference), parse(answer)
    symbolic = any(getattr(each, "free_symbols", None) for each in (*expected, *given))
    return not symbolic and verify(expected, given)


def prepare(text: str) -> str:
    """Rewrite notation that math-verify would misread: Unicode signs, mixed numbers, repeating decimals, e for a power of ten."""
    text = _LITTLE.sub("", text.translate(_SIGNS).replace("\\$", "")).strip().removesuffix(".").strip()
    for pattern, instead in _WORDS:
        text = pattern.sub(instead, text)
    return _REPEATING.sub(_write_as_fraction, text)


def parse(text: str, *, units: bool = True) -> list[Any]:
    """Return math-verify's parse of a prepared text; nothing if it would drop a part."""
    from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped,unused-ignore]
    from math_verify import LatexExtractionConfig
    from math_verify import parse as parse_with_math_verify

    if "\\ldots" in text:
        return []
    normalization = NormalizationConfig(basic_latex=True, units=units, malformed_operators=True, nits=True, boxed="all")
    # Its other parser, for expressions, takes any number it finds in text that this one cannot read.
    found: list[Any] = parse_with_math_verify(
        f"\\boxed{{{text}}}",
        [LatexExtractionConfig(normalization_config=normalization)],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # the worker enforces the limits
    )
    return found


def verify(expected: list[Any], given: list[Any]) -> bool:
    """math-verify's verdict on parsed expressions, including inequalities and intervals; small numbers are compared relatively."""
    from math_verify import verify as verify_with_math_verify  # type: ignore[import-untyped,unused-ignore]

    with _relative_comparison():
        return bool(verify_with_math_verify(expected, given, allow_set_relation_comp=True, timeout_seconds=None))


@contextmanager
def _relative_comparison() -> Iterator[None]:
    """Inside, math-verify's comparison of two numbers, which rounds to six decimal places, also applies ``_differ_relatively``.

    All its comparisons of sets, tuples, intervals and equations end there.
    """
    from math_verify import grader

    original = grader.sympy_numeric_eq

    def compare(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
        return original(a, b, float_rounding, numeric_precision) and not _differ_relatively(a, b)

    grader.sympy_numeric_eq = compare
    try:
        yield
    finally:
        grader.sympy_numeric_eq = original


def _differ_relatively(a: Any, b: Any) -> bool:
    """Whether two expressions that agree in six decimal places have different leading digits; exact if both are rational."""
    from math_verify.grader import get_pct_val
    from sympy import Rational  # type: ignore[import-untyped,unused-ignore]

    percent = get_pct_val(a) is not None, get_pct_val(b) is not None
    if percent[0] != percent[1]:  # 9% and 9 are the same answer
        return False
    try:
        first, second = (_evaluate_at_a_point(each.doit()) for each in (a, b))
        if isinstance(first, Rational) and isinstance(second, Rational):
            return bool(first != second)
        size = max(abs(first.evalf(PRECISION)), abs(second.evalf(PRECISION)))
        return bool(abs((first - second).evalf(PRECISION)) > LEAST_DIGITS * size)
    except (AttributeError, TypeError, ValueError, ArithmeticError):  # not a number
        return False


def _evaluate_at_a_point(expression: Any) -> Any:
    """An expression evaluated with a number for each symbol."""
    from sympy import Rational  # type: ignore[import-untyped,unused-ignore]

    symbols = sorted(expression.free_symbols, key=str)
    return (
        expression.subs({symbol: Rational(17 + 2 * place, 13) for place, symbol in enumerate(symbols)}) if symbols else expression
    )


def _write_as_fraction(decimal: re.Match[str]) -> str:
    whole, fixed, repeated = decimal[1] or "0", decimal[2], decimal[3]
    numerator = int(whole + fixed + repeated) - int(whole + fixed)
    return f"\\frac{{{numerator}}}{{{'9' * len(repeated) + '0' * len(fixed)}}}"


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
    def prepare_score(reference: str, answer: str) -> Callable[[], float]:
        def score() -> float:
            if not prepare(reference):
                raise UnparsableReference(f"the reference answer {reference!r:.200} cannot be parsed")
            return score_reply(reference, answer)

        return score

    for reference, answer in WARM_UP:
        prepare_score(reference, f"\\boxed{{{answer}}}")()
    prepare_score("1", "It is 2")()
    return prepare_score


def load_reported_math() -> Callable[..., Callable[[], float]]:
    for reference, answer in WARM_UP:
        prepare_reported_math("boxed", reference, answer)()
    return prepare_reported_math


def load_dapo() -> Callable[..., Callable[[], float]]:
    return lambda reference, answer: partial(score_dapo, reference, answer)
