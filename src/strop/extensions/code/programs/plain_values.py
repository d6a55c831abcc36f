"""Plain Python values as JSON, and back.

Values cross between the program of a policy and the tests only in this form: no class of one side ever exists on the other, so no
``__eq__`` of a policy's takes part in a comparison. What JSON has no word for is an object with one key, its kind. Part of programs in
the sandbox.
"""

from __future__ import annotations

import decimal
import fractions
import math
from collections.abc import Callable, Iterator
from typing import Any

DEEPEST = 100  # levels of containers
MOST_ITEMS = 100_000  # that are taken from an iterator
SHORT_INT = 10_000  # bits; longer ones are written in hexadecimal, which is read in linear time


class NotPlain(Exception):
    """A value that is not plain data."""


class MalformedValue(ValueError):
    """JSON that stands for no value."""


def encode_value(value: Any, refer: Callable[[Any], Any], depth: int = 0) -> Any:
    """Return a value as JSON data. ``refer`` gives the JSON of a value that is not plain, or raises NotPlain."""
    if depth > DEEPEST:
        raise NotPlain(f"data nested more than {DEEPEST} levels deep")
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        return int(value) if value.bit_length() <= SHORT_INT else {"int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    inner = [] if not isinstance(value, list | tuple) else [encode_value(item, refer, depth + 1) for item in value]
    if isinstance(value, list):
        return inner
    if isinstance(value, tuple):
        return {"tuple": inner}
    if isinstance(value, set | frozenset):
        items = [encode_value(item, refer, depth + 1) for item in value]
        return {"set" if isinstance(value, set) else "frozenset": sorted(items, key=repr)}
    if isinstance(value, dict):
        return {"dict": [[encode_value(part, refer, depth + 1) for part in item] for item in value.items()]}
    return _encode_rare(value, refer, depth)


def _encode_rare(value: Any, refer: Callable[[Any], Any], depth: int) -> Any:
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [encode_value(value.real, refer), encode_value(value.imag, refer)]}
    if isinstance(value, fractions.Fraction):
        return {"fraction": [encode_value(value.numerator, refer), encode_value(value.denominator, refer)]}
    if isinstance(value, decimal.Decimal):
        return {"decimal": str(value)}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, Iterator):
        items = [item for item, _ in zip(value, range(MOST_ITEMS), strict=False)]
        return {"iterator": [encode_value(item, refer, depth + 1) for item in items]}
    return refer(value)


def decode_value(data: Any, refer: Callable[[Any], Any]) -> Any:
    """Return the value that JSON data stands for. ``refer`` gives the value of a reference. Raises MalformedValue."""
    try:
        return _decode(data, refer, 0)
    except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise MalformedValue(f"{type(error).__name__}: {error}") from None


def _decode(data: Any, refer: Callable[[Any], Any], depth: int) -> Any:
    if depth > DEEPEST:
        raise MalformedValue(f"data nested more than {DEEPEST} levels deep")
    if isinstance(data, list):
        return [_decode(item, refer, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "reference":
        return refer(content)
    if kind == "dict":
        return {_decode(key, refer, depth + 1): _decode(value, refer, depth + 1) for key, value in content}
    if kind in TEXTUAL:
        return TEXTUAL[kind](str(content))
    return SEQUENTIAL[kind]([_decode(item, refer, depth + 1) for item in content])


TEXTUAL: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": bytes.fromhex,
    "decimal": decimal.Decimal,
}
SEQUENTIAL: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "iterator": iter,
    "complex": lambda parts: complex(*parts),
    "fraction": lambda parts: fractions.Fraction(*parts),
    "range": lambda parts: range(*parts),
}
