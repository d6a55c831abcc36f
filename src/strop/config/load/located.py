"""Locates problems found after loading, when only the values of a configuration are known, not their files and lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from strop.base_config import KeyPath
from strop.config.source.yaml_source import ConfigSource, get_at
from strop.problems import COMMAND_LINE, Problem

SUGGESTED = re.compile(r"; (?:did you mean|there are[: ])")  # the text after this lists suggestions, not actual values
KEY_FIRST = re.compile(r"(?P<key>[a-z_]\w*(?:\.[\w-]+)+): (?P<rest>.+)", re.DOTALL)


def locate_problems(problems: Sequence[Problem], source: ConfigSource) -> list[Problem]:
    """Return problems with the key that each concerns, and its location, if the configuration sets it."""
    return [problem if problem.origin else _locate(problem, source) for problem in problems]


def _locate(problem: Problem, source: ConfigSource) -> Problem:
    if not problem.key and (match := KEY_FIRST.fullmatch(problem.message)):
        problem = replace(problem, key=match["key"], message=match["rest"])
    path = tuple(problem.key.split(".")) if problem.key else ()
    inner = [key for key in source.origins if key[: len(path)] == path and len(key) > len(path)]
    if path not in source.origins or isinstance(get_at(source.values, path), dict | list):
        path = next(_find_named(problem.message, inner, source), path)
    return replace(problem, key=".".join(path), origin=source.find_origin(path))


def _find_named(message: str, keys: Sequence[KeyPath], source: ConfigSource) -> Iterator[KeyPath]:
    """Yield the set keys named by a message: by the whole key, by its name or by its value; most likely first."""
    message = SUGGESTED.split(message, maxsplit=1)[0]
    keys = sorted(keys, key=lambda key: source.origins[key].source != COMMAND_LINE)  # stable: otherwise in file order
    yield from (key for key in keys if len(key) > 1 and _occurs(".".join(key), message))
    yield from (key for key in keys if _occurs(f"'{key[-1]}'", message) or _occurs(f"option {key[-1]}", message))
    yield from (key for key in keys if "_" in key[-1] and _occurs(key[-1], message))
    values = {key: _find_value(get_at(source.values, key), message) for key in keys}
    yield from sorted((key for key in keys if values[key] >= 0), key=lambda key: values[key])


def _find_value(value: Any, message: str) -> int:
    """Return where a message first names a value, or each part of file.py:name; -1 if it does not."""
    if not isinstance(value, str) or len(value) < 3:
        return -1
    found = [_find(part, message) for part in value.split(":") if part]
    return found[0] if found and min(found) >= 0 else -1


def _occurs(text: str, message: str) -> bool:
    return _find(text, message) >= 0


def _find(text: str, message: str) -> int:
    found = re.search(rf"(?<![\w.]){re.escape(text)}(?![\w]|\.\w)", message)
    return found.start() if found else -1
