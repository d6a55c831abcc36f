"""Translate a recipe: from keys of NeMo-RL that Strop does not have to those that say the same here."""

from __future__ import annotations

from dataclasses import dataclass

from strop.base_config import BaseConfig
from strop.config.recipes.difference import Difference, Effect
from strop.config.recipes.nemo_rl.nemo_rl_rules import NEMO_RL_RULES
from strop.config.recipes.recipe import Recipe, matches_any
from strop.config.recipes.rules import apply_rules
from strop.config.source.yaml_source import ConfigSource
from strop.problems import Problem

MOST_NAMED = 8  # unused keys in a warning


@dataclass(frozen=True)
class Translation:
    """A recipe in Strop's keys, and how each key that does not stand as it is differs."""

    source: ConfigSource
    differences: tuple[Difference, ...]
    explained: tuple[str, ...] = ()  # patterns of keys of which a refusal has said what there is to say

    def explains(self, key: str) -> bool:
        """Return whether a problem with a key follows from a refusal."""
        return matches_any(key, self.explained)

    @property
    def problems(self) -> list[Problem]:
        """Why the recipe is refused."""
        return [difference.to_problem() for difference in self.of(Effect.REFUSED)]

    @property
    def warnings(self) -> list[Problem]:
        """What a run says of the recipe: each change of meaning, and in one line what has no effect."""
        changed = [difference.to_problem() for difference in self.of(Effect.CHANGED)]
        unused = [difference.key for difference in self.of(Effect.UNUSED)]
        if not unused:
            return changed
        more = f" and {len(unused) - MOST_NAMED} more" if len(unused) > MOST_NAMED else ""
        message = f"ignored keys of NeMo-RL that have no effect here: {', '.join(unused[:MOST_NAMED])}{more}"
        return [*changed, Problem("", message, "`strop translate` says why of each.")]

    def of(self, effect: Effect) -> list[Difference]:
        return [difference for difference in self.differences if difference.effect is effect]


def translate_source(source: ConfigSource, root: type[BaseConfig]) -> Translation:
    """Translate what a recipe sets; a configuration in Strop's own keys stays as it is."""
    recipe = Recipe(source, root)
    apply_rules(recipe, NEMO_RL_RULES)
    place = {".".join(path): index for index, path in enumerate(source.origins)}
    differences = sorted(recipe.differences, key=lambda difference: place.get(difference.key, 0))
    return Translation(recipe.finish(), tuple(differences), tuple(recipe.explained))
