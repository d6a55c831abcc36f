"""What a program wrote or returned against what it should have. All of it is data here: nothing of a policy's program takes part."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"[+-]?(?:\d{1,64}(?:\.\d{0,64})?|\.\d{1,64})(?:[eE][+-]?\d{1,3})?")


def same_output(found: str, expected: str, tolerance: float = 0.0) -> bool:
    """Compare two texts by lines and tokens: white space around lines and between tokens does not count, blank lines at the end neither.

    Numbers are equal as numbers (2 and 2.0), within ``tolerance``, relative or absolute.
    """
    first, second = found.strip().splitlines(), expected.strip().splitlines()
    return len(first) == len(second) and all(_same_line(a, b, tolerance) for a, b in zip(first, second, strict=True))


def _same_line(found: str, expected: str, tolerance: float) -> bool:
    first, second = found.split(), expected.split()
    return len(first) == len(second) and all(a == b or _same_number(a, b, tolerance) for a, b in zip(first, second, strict=True))


def _same_number(found: str, expected: str, tolerance: float) -> bool:
    if not (_NUMBER.fullmatch(found) and _NUMBER.fullmatch(expected)):
        return False
    first, second = Decimal(found), Decimal(expected)
    return first == second or _is_close(_to_float(first), _to_float(second), tolerance)


def _is_close(found: float, expected: float, tolerance: float) -> bool:
    return tolerance > 0 and abs(found - expected) <= tolerance * max(1.0, abs(expected))


def _to_float(number: float | Decimal) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer above all floats
        return math.inf


def same_value(found: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Compare JSON of ``encode_value``, which a hostile program wrote, with a value of JSON. Tuples equal lists, as in LiveCodeBench."""
    if isinstance(found, dict) and list(found) == ["tuple"]:
        found = found["tuple"]
    if isinstance(expected, list):
        same_length = isinstance(found, list) and len(found) == len(expected)
        return same_length and all(same_value(a, b, tolerance) for a, b in zip(found, expected, strict=True))
    if isinstance(expected, dict):
        return _same_mapping(found, expected, tolerance)
    if isinstance(expected, str) or expected is None:
        return type(found) is type(expected) and bool(found == expected)
    if isinstance(found, dict) and list(found) == ["int"]:
        return isinstance(expected, int) and found["int"] == hex(expected)
    if not isinstance(found, bool | int | float):
        return False
    return bool(found == expected) or _is_close(_to_float(found), _to_float(expected), tolerance)


def _same_mapping(found: Any, expected: dict[str, Any], tolerance: float) -> bool:
    items = found.get("dict") if isinstance(found, dict) else None
    if not isinstance(items, list) or not all(isinstance(item, list) and len(item) == 2 for item in items):
        return False
    values = {key: value for key, value in items if isinstance(key, str)}
    return len(items) == len(values) == len(expected) and all(
        key in values and same_value(values[key], expected[key], tolerance) for key in expected
    )
