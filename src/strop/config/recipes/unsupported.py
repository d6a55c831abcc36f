"""Something that a recipe asks for in several keys, and that this version lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from strop.config.recipes.recipe import Recipe
from strop.config.recipes.rules import describe, foreign_keys, is_switched_off


@dataclass(frozen=True)
class Unsupported:
    """One refusal for all keys about one thing, at the first that asks for it; nothing else is said of them.

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
                recipe.unused(key, "it is switched off" if off else f"nothing in the recipe asks for it, and {self.why}")


def _asking_keys(recipe: Recipe, pattern: str) -> Iterator[str]:
    key_pattern, has_value, wanted = pattern.partition("=")
    for key in recipe.find(key_pattern):
        value = recipe.value(key)
        if fnmatchcase(str(value), wanted) if has_value else not is_switched_off(value):
            yield key
