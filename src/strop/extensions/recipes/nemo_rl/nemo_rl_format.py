"""Files of NeMo-RL, and Strop's own: their keys are the same, and what differs is translated when any configuration is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.config.source.yaml_source import read_config_file
from strop.extensions.recipes.recipe_format import DEFAULT, ReadRecipe, RecipeFormat

KINDS = ("eval", "distillation", "ppo", "grpo", "sft", "dpo", "rm")  # a file of the first ones may have sections of the others


def find_kind(values: Mapping[str, Any]) -> str | None:
    """Return the kind of run that the sections of a configuration make; None if it is no run's."""
    return next((kind for kind in KINDS if kind in values), None)


def read_nemo_rl(path: Path) -> ReadRecipe:
    source = read_config_file(path)
    return ReadRecipe(find_kind(source.values), source)


FORMAT = RecipeFormat(DEFAULT, lambda values: find_kind(values) is not None, read_nemo_rl)
