"""Rules of a translation: most say what becomes of a key in one line, the others are functions of the recipe.

A rule is only about keys that Strop does not have, except the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from strop.extensions.recipes.recipe import Recipe


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
