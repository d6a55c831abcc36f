"""A recipe while it is translated: what it says, what was changed of it, and every difference."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase, translate
from functools import cache, cached_property
from typing import Any

from strop.base_config import BaseConfig, KeyPath
from strop.config.source.defaults import resolve_source
from strop.config.source.keys import find_field
from strop.config.source.yaml_source import ConfigSource, delete_key, get_at, iter_paths, iter_values, set_key
from strop.extensions.recipes.difference import Difference, Effect
from strop.problems import COMMAND_LINE, Origin


class Recipe:
    """The values of a recipe, changed in place by rules. Keys are dotted; ``value`` reads them with ``${...}`` resolved.

    A key that no rule changes keeps the value that the recipe gives it, whatever becomes of the keys that it refers to.
    """

    def __init__(self, source: ConfigSource, root: type[BaseConfig]) -> None:
        self.root = root
        self.source = source
        self.differences: list[Difference] = []
        self.explained: list[str] = []  # patterns of keys of which a refusal has said what there is to say
        self._written = source  # as the recipe was read
        self._changed: set[KeyPath] = set()
        self._listed: tuple[ConfigSource | None, list[str]] = (None, [])

    @cached_property
    def resolved(self) -> Mapping[str, Any]:
        """Everything that the recipe sets, on top of the schema's defaults, as it was read; unresolvable values are None."""
        return resolve_source(self._written, self.root)[0]

    def value(self, key: str, default: Any = None) -> Any:
        """Return what the recipe sets a key to, or the schema's default; ``default`` for a key that has neither, or is null."""
        found = get_at(self.resolved, tuple(key.split(".")))
        return default if found is None else found

    def is_set(self, key: str) -> bool:
        """Return whether the recipe, as translated so far, writes a key or a section (null counts)."""
        path = tuple(key.split("."))
        parent = get_at(self.source.values, path[:-1]) if len(path) > 1 else self.source.values
        return isinstance(parent, Mapping) and path[-1] in parent

    def is_written(self, key: str) -> bool:
        """Return whether the recipe, as it was read, writes a key or a section (null counts)."""
        return tuple(key.split(".")) in self._written.origins

    def is_on_command_line(self, key: str) -> bool:
        origin = self.source.find_origin(tuple(key.split(".")))
        return origin is not None and origin.source == COMMAND_LINE

    def layer_of(self, key: str) -> int:
        """Return which layer, base file first, sets a key or the section around it; -1 if none does."""
        path = tuple(key.split("."))
        while path and path not in self._written.origins:
            path = path[:-1]
        return self._written.layer_of(path) if path else -1

    def is_own_key(self, key: str) -> bool:
        """Return whether Strop's schema has this key or section."""
        return find_field(self.root, tuple(key.split("."))) is not None

    def find(self, pattern: str) -> Iterator[str]:
        """Yield the keys and sections that the recipe writes and ``pattern`` (as in ``fnmatch``) matches, outermost first."""
        if not _is_glob(pattern):
            if self.is_set(pattern):
                yield pattern
            return
        matches, section = _compile(pattern).match, "."
        for key in self._keys():
            if not key.startswith(section) and matches(key):
                section = f"{key}."
                yield key

    def _keys(self) -> list[str]:
        """Return every key and section that the recipe writes now, each section before its keys."""
        if self._listed[0] is not self.source:
            self._listed = self.source, [".".join(path) for path in iter_paths(self.source.values)]
        return self._listed[1]

    def set(self, key: str, value: Any, *, because: str) -> None:
        """Set a key, which counts as written where the key ``because`` of the recipe is."""
        origin = self._written.find_origin(tuple(because.split("."))) or Origin("the recipe")
        path = tuple(key.split("."))
        self.drop(key)
        _, self.source = set_key(self.source, path, value, origin)
        self._changed.add(path)

    def drop(self, key: str) -> None:
        """Remove a key or a section, if it is set."""
        if self.is_set(key):
            path = tuple(key.split("."))
            origin = self.source.find_origin(path) or Origin("the recipe")
            _, self.source = delete_key(self.source, path, origin)

    def note(self, key: str, effect: Effect, text: str, fix: str = "") -> None:
        """Record a difference of a key of the recipe."""
        origin = self._written.find_origin(tuple(key.split(".")))
        self.differences.append(Difference(key, effect, text, fix, origin))

    def unused(self, key: str, text: str) -> None:
        """Drop a key that changes nothing of what is trained."""
        self.note(key, Effect.UNUSED, text)
        self.drop(key)

    def unused_if_set(self, key: str, text: str) -> None:
        if self.is_set(key):
            self.unused(key, text)

    def refuse(self, key: str, text: str, fix: str) -> None:
        """Drop a key that asks for something that Strop would not do; the recipe is refused, unless it is for a reason around this one."""
        if not matches_any(key, self.explained):
            self.note(key, Effect.REFUSED, text, fix)
        self.drop(key)

    def rename(self, key: str, to: str, value: Any = None, *, effect: Effect = Effect.RENAMED, text: str = "") -> None:
        """Move a key's value, or ``value``, to another key. A value that the recipe gives to that one too stays."""
        value = self.value(key) if value is None else value
        if not self.is_set(to):
            self.set(to, value, because=key)
        self.note(key, effect, text or f"{to}={value} here")
        self.drop(key)

    def finish(self) -> ConfigSource:
        """Return the translated source. A key whose ``${...}`` would now say something else gets the value that it had."""
        if self.source is self._written:
            return self.source
        now, _ = resolve_source(self.source, self.root)
        interpolated = [path for path, value in iter_values(self.source.values) if isinstance(value, str) and "${" in value]
        for path in interpolated:
            before, after = (get_at(tree, path) for tree in (self.resolved, now))
            if before != after and before is not None and not any(path[: len(own)] == own for own in self._changed):
                origin = self.source.find_origin(path) or Origin("the recipe")
                _, self.source = set_key(self.source, path, before, origin)
        return self.source


@cache
def _is_glob(pattern: str) -> bool:
    return any(character in pattern for character in "*?[")


@cache  # of a few hundred patterns, more than fnmatch remembers
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))


def matches_any(key: str, patterns: Iterable[str]) -> bool:
    """Return whether a key, or a section around it, matches one of the patterns."""
    parts = key.split(".")
    keys = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(fnmatchcase(inner, pattern) for pattern in patterns for inner in keys)
