"""The libraries whose files can be read as configurations: each is a package here with a ``NAME_format.py`` that has a ``FORMAT``, or
several ``FORMATS``."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import strop.extensions.recipes
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
    read_for: Callable[[Path, int], ReadRecipe] | None = None  # as read, for so many GPUs; None: the file says how many


@functools.cache
def list_formats() -> dict[str, RecipeFormat]:
    """Return every format by its name; the default is the last."""
    packages = [module.name for module in pkgutil.iter_modules(strop.extensions.recipes.__path__) if module.ispkg]
    modules = [importlib.import_module(f"{strop.extensions.recipes.__name__}.{name}.{name}_format") for name in packages]
    formats: list[RecipeFormat] = [found for module in modules for found in getattr(module, "FORMATS", None) or [module.FORMAT]]
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
