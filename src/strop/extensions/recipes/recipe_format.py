"""The files of libraries that can be read as configurations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.config.load.recipe_library import iter_libraries
from strop.config.source import yaml_text
from strop.config.source.yaml_source import ConfigSource, parse_once
from strop.extensions.recipes.difference import Difference

DEFAULT = "nemo-rl"  # whose keys are Strop's


@dataclass(frozen=True)
class ReadRecipe:
    """A file of a library, in keys of Strop and of NeMo-RL."""

    kind: str | None  # of run: grpo, sft, ..., eval; None: the file configures no run
    source: ConfigSource
    differences: tuple[Difference, ...] = ()  # of the library's keys


@dataclass(frozen=True)
class RecipeFormat:
    """How a library writes down a run."""

    name: str  # for --from
    matches: Callable[[Mapping[str, Any]], bool]  # whether the values of a file, without what it inherits, are of this library
    read: Callable[[Path], ReadRecipe]  # raises ConfigError
    suffixes: tuple[str, ...] = (".yaml", ".yml")  # of its files
    read_for: Callable[[Path, int], ReadRecipe] | None = None  # as read, for this number of GPUs; None: the file says how many


@functools.cache
def list_formats() -> dict[str, RecipeFormat]:
    """Return every format of the libraries' files by its name; the default is the last."""
    formats: list[RecipeFormat] = [found for library in iter_libraries() for found in library.list_formats()]
    return {found.name: found for found in sorted(formats, key=lambda found: found.name == DEFAULT)}


def find_format(path: Path) -> RecipeFormat:
    """Return the format of a file, which is the default where no other matches."""
    if path.suffix not in list_formats()[DEFAULT].suffixes:
        other = next((found for found in list_formats().values() if path.suffix in found.suffixes), None)
        if other is not None and path.suffix != ".json":
            return other
    try:
        values, _ = parse_once(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml_text.YamlError):
        return list_formats()[DEFAULT]  # which says what is wrong with the file
    found = (other for other in list_formats().values() if isinstance(values, dict) and other.matches(values))
    return next(found, list_formats()[DEFAULT])
