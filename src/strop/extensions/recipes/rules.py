"""How a key of a recipe and what it becomes here differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase, translate
from functools import cache, cached_property
from typing import Any, TypeAlias

from strop.base_config import BaseConfig, KeyPath
from strop.config.source.interpolation import resolve_source
from strop.config.source.keys import find_field
from strop.config.source.yaml_source import ConfigSource, delete_key, get_at, iter_paths, iter_values, set_key
from strop.problems import COMMAND_LINE, Origin, Problem


class Effect(StrEnum):
    """What becomes of a key."""

    RENAMED = "renamed"  # another key says exactly the same here
    CHANGED = "changed"  # carried over, but not to the last digit: the text says how it differs
    UNUSED = "unused"  # it changes nothing of what is trained
    REFUSED = "refused"  # it asks for what Strop would not do


@dataclass(frozen=True)
class Difference:
    """One key of a recipe that does not stand as it is. ``text`` completes "KEY: ...", without a full stop."""

    key: str  # dotted, as the recipe writes it
    effect: Effect
    text: str
    fix: str = ""  # of a refusal: what to set instead
    origin: Origin | None = None

    def to_problem(self) -> Problem:
        return Problem(self.key, self.text, self.fix, self.origin)


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


@dataclass(frozen=True)
class Unused:
    """A key that changes nothing of what is trained here, whatever its value. ``why`` completes "KEY: ..."."""

    pattern: str
    why: str

    def __call__(self, recipe: Recipe) -> None:
        for key in foreign_keys(recipe, self.pattern):
            recipe.unused(key, self.why)


@dataclass(frozen=True)
class Renamed:
    """A key that another one stands for. ``*`` in both is the same text."""

    pattern: str
    to: str

    def __call__(self, recipe: Recipe) -> None:
        for key in foreign_keys(recipe, self.pattern):
            recipe.rename(key, _fill(self.to, self.pattern, key))


@dataclass(frozen=True)
class Refused:
    """Keys that ask for one thing that Strop would not do. One refusal is made for all: at the first of them that is switched on.

    Keys that are switched off (null, false, 0, empty, ``enabled: false``, a value in ``off``) are unused.
    """

    patterns: Sequence[str]
    why: str  # "NeMo-Gym's environments are not in this version"
    fix: str
    off: Sequence[Any] = ()

    def __call__(self, recipe: Recipe) -> None:
        refused = False
        for key in [key for pattern in self.patterns for key in foreign_keys(recipe, pattern)]:
            value = recipe.value(key)
            if is_switched_off(value) or value in self.off:
                recipe.unused(key, "it is switched off")
            elif refused:
                recipe.drop(key)
            else:
                recipe.refuse(key, f"found {describe(value)}, but {self.why}", self.fix)
                refused = True


Rule: TypeAlias = Callable[[Recipe], None]


def foreign_keys(recipe: Recipe, pattern: str) -> Iterator[str]:
    """Yield the keys that a pattern matches and Strop does not have."""
    yield from [key for key in recipe.find(pattern) if key.startswith("env.") or not recipe.is_own_key(key)]


def is_switched_off(value: Any) -> bool:
    """Return whether a value of a recipe asks for nothing."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(is_switched_off(inner) for inner in value.values())
    return value is None or value is False or value in (0, "", "none", "None") or value == []


def describe(value: Any) -> str:
    """Return a value as a message shows it: a section by its first keys."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        names = [str(name) for name in value]
        return "a section with " + ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        return f"a list of {len(value)}"
    return f"{value!r:.80}"


def _fill(to: str, pattern: str, key: str) -> str:
    """``*.a.old`` -> ``*.a.new``: put what ``*`` matched into the new name."""
    if "*" not in to:
        return to
    before, _, after = pattern.partition("*")
    return to.replace("*", key[len(before) : len(key) - len(after)] if after else key[len(before) :])


@dataclass(frozen=True)
class Unsupported:
    """One refusal for all keys about one thing, at the first that requests it; the others are not reported.

    ``asked_by`` are patterns of keys, as in ``fnmatch``, which ask unless they are switched off; or with ``=``, and a pattern of the value
    that asks. ``details`` are patterns of keys that only say how; where nothing asks, those that Strop does not have are unused.
    ``hides`` are patterns of keys that it shares with other things.
    """

    asked_by: Sequence[str]
    why: str  # "replaying the engine's routing is not in this version"
    fix: str
    details: Sequence[str] = ()
    hides: Sequence[str] = ()

    def __call__(self, recipe: Recipe) -> None:
        asking = [key for pattern in self.asked_by for key in _asking_keys(recipe, pattern)]
        about = [*(pattern for pattern in self.asked_by if "=" not in pattern), *self.details]
        if asking:
            recipe.refuse(asking[0], f"found {describe(recipe.value(asking[0]))}, but {self.why}", self.fix)
            recipe.explained += [*asking, *about, *self.hides]
        for key in dict.fromkeys(key for pattern in about for key in foreign_keys(recipe, pattern)):
            if asking:
                recipe.drop(key)
            else:
                off = is_switched_off(recipe.value(key))
                recipe.unused(key, "it is switched off" if off else f"nothing in the recipe requests it, and {self.why}")


def _asking_keys(recipe: Recipe, pattern: str) -> Iterator[str]:
    key_pattern, has_value, wanted = pattern.partition("=")
    for key in recipe.find(key_pattern):
        value = recipe.value(key)
        if fnmatchcase(str(value), wanted) if has_value else not is_switched_off(value):
            yield key
