"""What a process that scores answers imports for patterns and JSON schemas, without the verifiers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=256)
def _make_pattern(pattern: str, flags: int) -> re.Pattern[str]:
    return re.compile(pattern, flags)


def _prepare_pattern(pattern: str, flags: int, match: str, text: str) -> Callable[[], float]:
    """Return a function that tests whether a text matches, or counts its non-empty matches."""
    matcher = _make_pattern(pattern, flags)

    def score() -> float:
        if match == "count":
            return float(sum(found.end() > found.start() for found in matcher.finditer(text)))
        return float(getattr(matcher, match)(text) is not None)

    return score


@lru_cache(maxsize=256)
def _make_validator(schema: str) -> Any:
    import jsonschema
    import referencing

    parsed = json.loads(schema)
    kind = jsonschema.validators.validator_for(parsed, default=jsonschema.Draft202012Validator)
    return kind(parsed, registry=referencing.Registry())  # an empty registry: a schema cannot fetch anything


def _prepare_json_schema(schema: str, text: str) -> Callable[[], float]:
    """Return a function that gives 1 for JSON valid under the schema, 0.5 for other JSON, and otherwise 0."""
    validator = _make_validator(schema)

    def score() -> float:
        try:
            document = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return 0.0
        return 1.0 if validator.is_valid(document) else 0.5

    return score


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def load_json_schema() -> Callable[..., Callable[[], float]]:
    _prepare_json_schema("{}", "{}")()
    return _prepare_json_schema


def load_pattern() -> Callable[..., Callable[[], float]]:
    return _prepare_pattern
