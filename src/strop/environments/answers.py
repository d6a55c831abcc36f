"""Finding the final answer in what a model wrote, and bringing it to a normal form."""

from __future__ import annotations

import re
from fractions import Fraction

# A minus sign belongs to the number unless it stands between two things: "10-3" holds 10 and 3.
_NUMBER = re.compile(r"(?:(?<![\w)\]}])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_STATED = re.compile(r"(?:####|answer\s+is\s*:?|answer\s*:)\s*(.+)", re.IGNORECASE)
_RATIONAL = re.compile(r"[+-]?\d{1,200}(?:\.\d{1,200})?(?:/\d{1,200})?")
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_INTEGER = re.compile(r"-?\d+")


def last_number(text: str) -> Fraction | None:
    """The last number in ``text``; thousands may be separated by commas."""
    found = _NUMBER.findall(text.replace("\u2212", "-"))
    return _fraction(found[-1].replace(",", "")) if found else None


def last_boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{...}`` that is closed."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for end in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : end].strip()
        start = text.rfind("\\boxed{", 0, start)
    return None


def final_answer(text: str) -> str | None:
    """The box, else what follows the last "answer is" or "####" on its line, else the last number."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    if stated := _STATED.findall(text):
        return str(stated[-1]).strip()
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def normal_form(answer: str) -> str:
    """Equal answers that are written alike become equal strings; rational numbers are brought to lowest terms."""
    text = answer.strip().strip("$").strip().removesuffix(".").replace("\u2212", "-")
    text = re.sub(r"\\(?:left|right|!|,|;|\s)", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\s+", "", re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r"\1", text))
    number = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", _FRACTION.sub(r"\1\2/\3", text))
    value = _fraction(number) if _RATIONAL.fullmatch(number) else None
    return text if value is None else str(value)


def is_integer(normal: str) -> bool:
    return _INTEGER.fullmatch(normal) is not None


def _fraction(text: str) -> Fraction | None:
    try:
        numerator, _, denominator = text.partition("/")
        return Fraction(numerator) / Fraction(denominator or "1")
    except (ValueError, ZeroDivisionError):  # more digits than Python converts, or no number at all
        return None
