"""Tables that say what becomes of each key of a library: one entry for a key, or for all keys of a pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.library_recipe import LibraryRecipe
from strop.extensions.recipes.rules import is_switched_off


@dataclass(frozen=True)
class Carried:
    """Another key says the same. ``convert`` gives its value there."""

    to: tuple[str, ...]
    convert: Callable[[Any], Any] = lambda value: value

    def apply(self, recipe: LibraryRecipe, key: str) -> None:
        if recipe.is_known(key):
            recipe.carry(key, self.to[0], self.convert(recipe.value(key)))


@dataclass(frozen=True)
class Left:
    """It changes nothing of what is trained. ``to`` names keys of Strop's about the same thing."""

    why: str
    to: tuple[str, ...] = ()

    def apply(self, recipe: LibraryRecipe, key: str) -> None:
        recipe.unused(key, self.why)


@dataclass(frozen=True)
class Lacking:
    """It asks for what Strop would not do, unless it is switched off or has the library's default. Of several keys the first says so."""

    why: str
    fix: str = "Remove the key."
    to: tuple[str, ...] = ()

    def apply(self, recipe: LibraryRecipe, key: str) -> None:
        """Refuse a key that requests it (``asks``)."""
        recipe.refuse(key, self.why, self.fix)

    def asks(self, recipe: LibraryRecipe, key: str) -> bool:
        return not (is_switched_off(recipe.value(key)) or recipe.is_default(key))


@dataclass(frozen=True)
class Together:
    """Several keys that say one thing, which a function translates once."""

    translate: Callable[[LibraryRecipe], None]
    to: tuple[str, ...] = ()

    def apply(self, recipe: LibraryRecipe, key: str) -> None:
        self.translate(recipe)


Entry: TypeAlias = Carried | Left | Lacking | Together
KeyTable: TypeAlias = Mapping[str, Entry]


def to(*keys: str) -> Carried:
    return Carried(keys)


def find_entry(table: KeyTable, key: str) -> Entry | None:
    """Return the entry of a key: its own, or that of the first pattern that matches it or a section around it."""
    if key in table:
        return table[key]
    parts = key.split(".")
    around = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((entry for pattern, entry in table.items() for name in around if fnmatchcase(name, pattern)), None)


def apply_table(recipe: LibraryRecipe, table: KeyTable) -> None:
    """Translate what a file says and, where the library's defaults are not Strop's, what it leaves open."""
    done: list[Callable[[LibraryRecipe], None] | Lacking] = []
    for key in dict.fromkeys([*recipe.values, *(key for key in table if "*" not in key)]):
        entry = find_entry(table, key)
        if entry is None:
            fix = "Remove the key, or correct its name."
            recipe.note(
                key, Effect.REFUSED, f"{recipe.library} has no such key for this kind of run, as far as is known here", fix
            )
        elif isinstance(entry, Together):
            if entry.translate not in done:
                done.append(entry.translate)
                entry.translate(recipe)
        elif isinstance(entry, Lacking):
            if entry.asks(recipe, key) and not any(entry is other for other in done):
                done.append(entry)
                entry.apply(recipe, key)
        else:
            entry.apply(recipe, key)
