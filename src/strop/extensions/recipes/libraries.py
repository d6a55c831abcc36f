"""The libraries whose recipes are read here. Rules and tables are imported once a file or a key asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strop.base_config import BaseConfig
from strop.config.load.recipe_library import RecipeLibrary, Translation
from strop.config.source.yaml_source import ConfigSource

if TYPE_CHECKING:
    from strop.extensions.recipes.library_recipe import RecipeFormat


class NemoRl(RecipeLibrary):
    """NeMo-RL, whose keys are mostly Strop's, so that they may stand in any configuration."""

    def translate(self, source: ConfigSource, root: type[BaseConfig]) -> Translation | None:
        from strop.extensions.recipes.translation import translate_nemo_rl

        return translate_nemo_rl(source, root)

    def list_formats(self) -> Sequence[RecipeFormat]:
        from strop.extensions.recipes.nemo_rl.nemo_rl_rules import FORMAT

        return (FORMAT,)


class Verl(RecipeLibrary):
    """verl."""

    def list_formats(self) -> Sequence[RecipeFormat]:
        from strop.extensions.recipes.verl.verl_format import FORMAT

        return (FORMAT,)


class Trl(RecipeLibrary):
    """TRL, whose arguments are flat: one that is written alone or in a section is explained."""

    def explain_key(self, kind: str, name: str, value: Any) -> str:
        from strop.extensions.recipes.trl.trl_format import explain_key

        return explain_key(kind, name, value)

    def list_formats(self) -> Sequence[RecipeFormat]:
        from strop.extensions.recipes.trl.trl_format import FORMATS

        return FORMATS


NEMO_RL, VERL, TRL = NemoRl(), Verl(), Trl()
