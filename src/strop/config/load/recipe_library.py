"""What the loader asks of another library whose words may stand in a configuration: entry points of the group ``strop.recipes``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from strop import plugins
from strop.base_config import BaseConfig
from strop.config.source.yaml_source import ConfigSource
from strop.problems import Problem


@dataclass(frozen=True)
class Translation:
    """A configuration in Strop's words, and what there is to say of those that were another library's."""

    source: ConfigSource
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    differences: tuple[Any, ...] = ()  # of the library's words from what they are here
    explains: Callable[[str], bool] = lambda key: False  # whether a problem with a key follows from these problems

    def then(self, found: Translation) -> Translation:
        """Return the translation of this one's source, with what there is to say of both."""
        return Translation(
            found.source,
            self.problems + found.problems,
            self.warnings + found.warnings,
            self.differences + found.differences,
            lambda key: self.explains(key) or found.explains(key),
        )


class RecipeLibrary:
    """A library whose recipes can be read. Each configuration is shown to it, so it imports its rules only where it knows a word."""

    def translate(self, source: ConfigSource, root: type[BaseConfig]) -> Translation | None:
        """Translate what a configuration says in the library's words; None where it says nothing in them."""
        return None

    def explain_key(self, kind: str, name: str, value: Any) -> str:
        """Return what a key that Strop does not have, of this kind of run (grpo, sft, ...), is here; empty for one of no meaning."""
        return ""

    def list_formats(self) -> Sequence[Any]:
        """Return the formats of the library's own files, for a command that reads them."""
        return ()


def iter_libraries() -> Iterator[RecipeLibrary]:
    for name in sorted(plugins.declared("recipes")):
        yield plugins.load("recipes", name)


def translate_source(source: ConfigSource, root: type[BaseConfig]) -> Translation:
    """Translate what a configuration says in the words of each library; its own stay as they are."""
    whole = Translation(source)
    for library in iter_libraries():
        if (found := library.translate(whole.source, root)) is not None:
            whole = whole.then(found)
    return whole


def explain_key(kind: str, name: str, value: Any) -> str:
    """Return what a key that Strop does not have is in another library; empty if none has it."""
    return next((said for library in iter_libraries() if (said := library.explain_key(kind, name, value))), "")
