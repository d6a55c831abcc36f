"""Common parts of formats: strict JSON parsing, and splitting off reasoning."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from strop.types import ToolCall


class MalformedCall(ValueError):
    """A call cannot be parsed. The message is shown to the policy."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise MalformedCall("its JSON has a key twice")
    return result


def _reject_constant(name: str) -> Any:
    raise MalformedCall(f"its JSON has {name}, which is no JSON")


def _read_float(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise MalformedCall(f"its JSON has the number {number:.40}, which is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_reject_constant, parse_float=_read_float)


def skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    return start


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Read one JSON value from ``start`` on; return it and its end. Raises MalformedCall."""
    try:
        return _DECODER.raw_decode(text, skip_space(text, start))
    except json.JSONDecodeError as error:
        raise MalformedCall(f"it is not valid JSON: {error.msg} at character {error.pos - start}") from None
    except MalformedCall:
        raise
    except (ValueError, RecursionError) as error:  # an integer with thousands of digits, or deeply nested brackets
        raise MalformedCall(f"its JSON cannot be read: {type(error).__name__}") from None


def read_whole_json(text: str) -> Any:
    """Read a text that is one JSON value. Raises MalformedCall."""
    value, end = read_json(text)
    if text[end:].strip():
        raise MalformedCall(f"text follows its JSON: {text[end:].strip()!r:.60}")
    return value


def make_call(value: Any, *, arguments: Sequence[str] = ("arguments",), extra: Sequence[str] = ()) -> ToolCall:
    """Make a call from a JSON object with ``name`` and one of the keys ``arguments``; ``extra`` keys are ignored. Raises MalformedCall."""
    if not isinstance(value, Mapping):
        raise MalformedCall(f"it is no JSON object but {type(value).__name__}")
    wanted = f'an object with "name" and "{arguments[0]}"'
    keys = [key for key in arguments if key in value]
    if "name" not in value or len(keys) != 1:
        raise MalformedCall(f"it has the keys {sorted(value)}, and a call is {wanted}")
    if unknown := sorted(set(value) - {"name", keys[0], *extra}):
        raise MalformedCall(f"it has the keys {unknown} besides, and a call is {wanted}")
    return named_call(value["name"], value[keys[0]], str(value.get("id") or ""))


def named_call(name: Any, arguments: Any, id: str = "") -> ToolCall:
    """Make a call. Raises MalformedCall for a name that is not a text, and for arguments that are not an object."""
    if not isinstance(name, str) or not name.strip():
        raise MalformedCall(f"its name is {name!r:.60}, which is no name of a tool")
    if not isinstance(arguments, Mapping):
        raise MalformedCall(f"the arguments of {name} are {arguments!r:.60}, not an object of arguments by name")
    return ToolCall(name.strip(), arguments, id)


def read_argument(name: str, text: str, tool: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    """Parse an argument written as text: kept as text if the schema says so or is missing, otherwise JSON. Raises MalformedCall."""
    functions: list[Mapping[str, Any]] = [each["function"] for each in tools if each["function"]["name"] == tool]
    schema = (functions[0] if functions else {}).get("parameters", {}).get("properties", {}).get(name, {})
    types = json_types(schema)
    if not types or "string" in types:
        return None if "null" in types and text.strip() == "null" else text
    try:
        return read_whole_json(text)
    except MalformedCall as error:
        raise MalformedCall(
            f"the argument {name} of {tool} is {text!r:.60}, and must be of type {' or '.join(types)}: {error}"
        ) from None


def json_types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the JSON types that a schema allows at its top level; empty if not specified."""
    if isinstance(options := schema.get("anyOf") or schema.get("oneOf"), list):
        found = [json_types(option) for option in options if isinstance(option, Mapping)]
        return tuple(dict.fromkeys(name for names in found for name in names)) if all(found) else ()
    named = schema.get("type", ())
    if not named and isinstance(values := schema.get("enum"), list):
        return ("string",) if all(isinstance(value, str) for value in values) else ()
    return (named,) if isinstance(named, str) else tuple(named)
