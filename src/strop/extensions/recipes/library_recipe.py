"""A file of a library whose keys are not Strop's, while it is translated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from strop.base_config import BaseConfig
from strop.config.schema.run_config import TRAINING_RUNS
from strop.config.source import keys
from strop.config.source.yaml_source import ConfigSource, delete_key, get_at, set_key
from strop.extensions.recipes.difference import Difference, Effect
from strop.extensions.recipes.recipe_format import ReadRecipe
from strop.extensions.recipes.rules import describe
from strop.problems import Origin


class LibraryRecipe:
    """What a file of a library says, and what is made of it in Strop's keys. Keys of both are dotted.

    What the file leaves open has the library's default, which is written down where Strop's is another.
    """

    def __init__(
        self, kind: str, values: Mapping[str, Any], origins: Mapping[str, Origin], defaults: Mapping[str, Any], library: str
    ) -> None:
        self.kind = kind  # of run, and the name of its section
        self.values = values
        self.library = library
        self.differences: list[Difference] = []
        self._origins = origins
        self._library_defaults = defaults
        self._root: type[BaseConfig] = TRAINING_RUNS[kind]
        self._own_defaults = keys.default_values(self._root)
        self._made = ConfigSource()

    def value(self, key: str) -> Any:
        """Return what the file says, or the library's default."""
        return self.values[key] if key in self.values else self._library_defaults.get(key)

    def is_written(self, key: str) -> bool:
        return key in self.values

    def is_known(self, key: str) -> bool:
        """Return whether the file or the library's defaults say something."""
        return key in self.values or key in self._library_defaults

    def is_default(self, key: str) -> bool:
        """Return whether a key has the library's default, written or not."""
        return key not in self.values or self.values[key] == self._library_defaults.get(key)

    def set(self, to: str, value: Any, *, because: str = "") -> None:
        """Set a key of Strop's, unless its default says the same."""
        path = tuple(self.name_key(to).split("."))
        is_free = "kwargs" in path or any(get_at(self._own_defaults, path[:depth]) == {} for depth in range(1, len(path)))
        default = "" if is_free else get_at(self._own_defaults, path)
        may_skip = value is None or not self.is_written(because)
        if may_skip and type(value) is type(default) and value == default and get_at(self._made.values, path) is None:
            return
        origin = self._origins.get(because) or Origin(f"a default of {self.library}")
        _, self._made = delete_key(self._made, path, origin)  # a section is replaced, not merged
        problem, self._made = set_key(self._made, path, value, origin)
        assert problem is None, problem

    def origin_of(self, key: str) -> Origin | None:
        return self._origins.get(key)

    def name_key(self, to: str) -> str:
        """Put the section of this kind of run into a key of Strop's."""
        return to.replace("{section}", self.kind)

    def carry(self, key: str, to: str, value: Any, text: str = "", *, changed: bool = False) -> None:
        """Set a key of Strop's to what a key of the library stands for."""
        self.set(to, value, because=key)
        if value is None and self.value(key) is None:
            return
        if changed or self.is_written(key):
            says = text or f"{self.name_key(to)}={describe(value) if isinstance(value, dict | list) else _as_yaml(value)} here"
            self.note(key, Effect.CHANGED if changed else Effect.RENAMED, says)

    def note(self, key: str, effect: Effect, text: str, fix: str = "") -> None:
        self.differences.append(Difference(key, effect, text, fix, self._origins.get(key)))

    def unused(self, key: str, why: str) -> None:
        """Say that a key changes nothing, unless it says what the library would do without it."""
        if self.is_written(key) and not self.is_default(key):
            self.note(key, Effect.UNUSED, why)

    def refuse(self, key: str, why: str, fix: str) -> None:
        self.note(key, Effect.REFUSED, f"found {describe(self.value(key))}, but {why}", fix)

    def finish(self, order: Iterable[str], files: tuple[Any, ...] = ()) -> ReadRecipe:
        """Return what was made, with the differences in the order of the file."""
        place = {key: index for index, key in enumerate(order)}
        said = [other for index, other in enumerate(self.differences) if other not in self.differences[:index]]
        differences = sorted(said, key=lambda difference: place.get(difference.key, len(place)))
        source = ConfigSource(self._made.values, self._made.origins, files)
        return ReadRecipe(self.kind, source, tuple(differences))


def _as_yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
