"""Extract the final answer from a model's output and normalize it.

This runs in the event loop on arbitrary model output, so every function takes time linear in the length of its text.
"""

from __future__ import annotations

import re
from fractions import Fraction

# A minus sign belongs to the number unless it is a binary operator: "10-3" contains 10 and 3.
_NUMBER = re.compile(r"(?:(?<![\w)\]}])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_STATED_ANSWER = re.compile(r"(?:####|answer\s+is\s*:?|answer\s*:)\s*(.+)", re.IGNORECASE)
_RATIONAL = re.compile(r"[+-]?\d{1,200}(?:\.\d{1,200})?(?:/\d{1,200})?")
_FRACTION = re.compile(r"([+-]?)(\d{0,200})\\frac\{(\d{1,200})\}\{(\d{1,200})\}|([+-]?)(\d{1,200}) (\d{1,200})/(\d{1,200})")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac ?(?:(\d) ?(\d)(?!\d))?")
_THOUSANDS = re.compile(r"(?<=\d)[, ](?=\d{3}(?![\d/]))")
_INTEGER = re.compile(r"-?\d+")
_LATEX_SPACE = re.compile(r"\\[!,;: ]|\{,\}(?=\d)|\\text\{[^{}]*\}")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"[{}]")
MOST_LINES, MOST_BOXES = 200, 20  # limits of the search for boxes of several answers
_TRAILING_SPACE = 64  # trailing white space searched by _STATED_ANSWER, whose time is quadratic in its length


def extract_last_number(text: str) -> Fraction | None:
    """Return the last number in ``text``, or None. Commas may separate thousands."""
    numbers = _NUMBER.findall(text.replace("\u2212", "-"))
    return _parse_fraction(numbers[-1].replace(",", "")) if numbers else None


def extract_last_boxed(text: str) -> str | None:
    """Return the content of the last ``\\boxed{...}`` or ``\\fbox{...}``, empty if it is not closed; None if there is none."""
    *_, last = [None, *_BOX.finditer(text)]
    if last is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, last.end()):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[last.end() : brace.start()].strip()
    return ""


def extract_last_boxes(text: str) -> str | None:
    """Return the contents of the boxes in the last line that has one, with commas between them; else as ``extract_last_boxed``."""
    if not (last := extract_last_boxed(text)):
        return last
    for line in reversed(text.splitlines()[-MOST_LINES:]):
        starts = [found.start() for found in _BOX.finditer(line)][-MOST_BOXES:]
        ends = [*starts[1:], len(line)][: len(starts)]
        boxes = [extract_last_boxed(line[start:end]) for start, end in zip(starts, ends, strict=True)]
        if any(boxes):
            return ", ".join(filter(None, boxes))
    return last


def extract_stated_number(text: str) -> Fraction | None:
    """Return the number of the last box, else of what follows the last "####" or "answer is", else the last number, or None."""
    boxed = extract_last_boxed(text)
    if boxed is not None:
        normal = normalize_answer(boxed)
        return _parse_fraction(normal) if _RATIONAL.fullmatch(normal) else extract_last_number(_LATEX_SPACE.sub("", boxed))
    stated = _STATED_ANSWER.findall(text[: len(text.rstrip()) + _TRAILING_SPACE])
    number = extract_last_number(stated[-1]) if stated else None
    return extract_last_number(text) if number is None else number


def extract_last_tagged(text: str, tag: str) -> str | None:
    """Return the content of the last ``<tag>...</tag>``, which does not contain ``</tag>``, or None."""
    found, position = None, 0
    while (begin := text.find(f"<{tag}>", position)) >= 0 and (end := text.find(f"</{tag}>", begin)) >= 0:
        found, position = text[begin + len(tag) + 2 : end], end + len(tag) + 3
    return None if found is None else found.strip()


def extract_final_answer(text: str) -> str | None:
    """Return the last boxed answer, else the rest of the line after the last "answer is" or "####", else the last number, else None."""
    if (boxed := extract_last_boxed(text)) is not None:
        return boxed
    if stated := _STATED_ANSWER.findall(text[: len(text.rstrip()) + _TRAILING_SPACE]):
        return str(stated[-1]).strip()
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def normalize_answer(answer: str) -> str:
    """Normalize notation, so that equal answers in similar notation become equal strings. Rational numbers are reduced to lowest terms."""
    text = answer.strip().strip("$").strip().removesuffix(".").replace("\u2212", "-")
    text = re.sub(r"\s+", " ", re.sub(r"\\(?:left|right|!|,|;|\s)", "", text))
    text = _SHORT_FRACTION.sub(lambda found: "\\frac" + (f"{{{found[1]}}}{{{found[2]}}}" if found[1] else ""), text)
    # Between digits a space is significant: 1 3/4 is not 13/4.
    text = re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r"\1", text))
    number = _THOUSANDS.sub("", text)
    if fraction := _FRACTION.fullmatch(text):
        sign, whole, numerator, denominator = (each or "" for each in fraction.groups()[0 if fraction[3] else 4 :][:4])
        number = f"{sign}{int(whole or 0) * int(denominator) + int(numerator)}/{denominator}"
    value = _parse_fraction(number) if _RATIONAL.fullmatch(number) else None
    return text if value is None else str(value)


def is_integer(normal: str) -> bool:
    return _INTEGER.fullmatch(normal) is not None


def _parse_fraction(text: str) -> Fraction | None:
    try:
        numerator, _, denominator = text.partition("/")
        return Fraction(numerator) / Fraction(denominator or "1")
    except (ValueError, ZeroDivisionError):  # more digits than Python converts, or not a number
        return None
