"""Observations and actions of Gymnasium as text: plain words and JSON, by their space."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from strop.environments.answers import extract_last_tagged


class InvalidAction(ValueError):
    """A text is no action of the environment. The message is told to the policy."""


def to_plain(value: Any) -> Any:
    """Return an element of a space as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(inner) for inner in value]
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    return round(value, 4) if isinstance(value, float) else value


def describe_observation(value: Any) -> str:
    plain = to_plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def describe_space(space: Any, names: Sequence[str] = ()) -> str:
    """Say in one sentence what an action looks like."""
    if names:
        return f"one of {', '.join(names)}"
    kind = type(space).__name__
    if kind == "Discrete":
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} of the characters {space.characters!r}"
    if kind in ("MultiDiscrete", "MultiBinary", "Box"):
        return f"a JSON list of shape {list(space.shape)}, {_bounds(space, kind)}"
    if kind == "Dict":
        return "a JSON object: " + "; ".join(f"{key!r}: {describe_space(inner)}" for key, inner in space.spaces.items())
    if kind == "Tuple":
        return "a JSON list: " + "; ".join(describe_space(inner) for inner in space.spaces)
    raise TypeError(kind)


def _bounds(space: Any, kind: str) -> str:
    if kind == "MultiBinary":
        return "of 0 and 1"
    if kind == "MultiDiscrete":
        return f"of whole numbers from {to_plain(space.start)} to {to_plain(space.start + space.nvec - 1)}"
    low, high = np.unique(space.low), np.unique(space.high)
    return f"of numbers from {_bound(low, space.low)} to {_bound(high, space.high)}"


def _bound(distinct: Any, bounds: Any) -> Any:
    return to_plain(distinct[0]) if len(distinct) == 1 else to_plain(bounds)


def parse_action(space: Any, text: str, names: Sequence[str] = ()) -> Any:
    """Return the action that a text asks for: in the last <action>...</action>, else the whole text. Raises InvalidAction."""
    tagged = extract_last_tagged(text, "action")
    given = text.strip() if tagged is None else tagged.strip()
    if type(space).__name__ == "Discrete":
        action: Any = _parse_choice(space, given, names)
    elif type(space).__name__ == "Text":
        action = given
    else:
        try:
            action = _from_plain(space, json.loads(given[-10_000:]))
        except (ValueError, TypeError, RecursionError, OverflowError, KeyError):
            action = None
    if action is None or not space.contains(action):
        raise InvalidAction(f"{given[:80]!r} is not an action. An action is {describe_space(space, names)}.")
    return action


def _parse_choice(space: Any, given: str, names: Sequence[str]) -> int | None:
    """Return the choice that is named last, by its name or its number."""
    choices = {name.lower(): space.start + index for index, name in enumerate(names)}
    choices |= {str(number): number for number in range(space.start, space.start + space.n)} if not names else {}
    words = sorted(map(re.escape, choices), key=len, reverse=True)
    found = re.findall(rf"(?<![\w-])(?:{'|'.join(words)})(?!\w|\.\d)", given[-10_000:].lower())
    return choices[found[-1]] if found else None


def _from_plain(space: Any, value: Any) -> Any:
    """Return a value of JSON as an element of a space."""
    kind = type(space).__name__
    if kind == "Dict":
        return {key: _from_plain(inner, value[key]) for key, inner in space.spaces.items()}
    if kind == "Tuple":
        return tuple(_from_plain(inner, item) for inner, item in zip(space.spaces, value, strict=True))
    if kind == "Discrete":
        return space.dtype.type(value) if isinstance(value, int) else None
    return value if kind == "Text" else np.asarray(value, dtype=space.dtype)
