"""Files of libraries whose keys are not Strop's, while they are translated: their formats, and tables of what becomes of each key."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from strop.base_config import BaseConfig
from strop.config.load.recipe_library import iter_libraries
from strop.config.schema.run_config import TRAINING_RUNS
from strop.config.source import keys, yaml_text
from strop.config.source.yaml_source import ConfigSource, delete_key, get_at, parse_once, set_key
from strop.extensions.recipes.rules import Difference, Effect, describe, is_switched_off
from strop.extensions.trackers.trackers_config import SERVICES
from strop.problems import Origin

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


# Of each service, what its runs and what a group of runs are called. TensorBoard has neither: it shows folders.
RUN_NAMES: Mapping[str, str] = {
    "wandb": "logger.wandb.name",
    "mlflow": "logger.mlflow.run_name",
    "swanlab": "logger.swanlab.name",
    "trackio": "logger.trackio.name",
}
PROJECTS: Mapping[str, str] = {
    "wandb": "logger.wandb.project",
    "mlflow": "logger.mlflow.experiment_name",
    "swanlab": "logger.swanlab.project",
    "trackio": "logger.trackio.project",
}
SERVICE_KEYS = (*(f"logger.{name}_enabled" for name in SERVICES), *RUN_NAMES.values(), *PROJECTS.values())


def enable_services(
    recipe: LibraryRecipe, key: str, asked: Iterable[Any], *, silent: Collection[str], same: Mapping[str, str]
) -> tuple[str, ...]:
    """Switch on the services that ``key`` names, and return them.

    ``silent`` are names that ask for what Strop does anyway, and ``same`` other names of services. What Strop lacks is said.
    """
    names = [str(name) for name in asked]
    services = tuple(name for name in SERVICES if name in [same.get(other, other) for other in names])
    for name in SERVICES:
        recipe.set(f"logger.{name}_enabled", name in services, because=key)
    if recipe.is_written(key):
        lacking = [name for name in names if same.get(name, name) not in SERVICES and name not in silent]
        enabled = " and ".join(f"logger.{name}_enabled=true" for name in services)
        if lacking:
            there_is = f"there is no tracker {', '.join(lacking)} here"
            recipe.note(key, Effect.UNUSED, f"{there_is}; {enabled} here" if enabled else there_is)
        else:
            recipe.note(
                key, Effect.RENAMED, f"{enabled} here" if enabled else "metrics.jsonl has every metric, and no service does"
            )
    return services


def name_in_services(recipe: LibraryRecipe, key: str, keys: Mapping[str, str], services: Iterable[str]) -> bool:
    """Carry the name that ``key`` gives to those of ``services`` that have one. Returns whether any does."""
    named = [keys[service] for service in services if service in keys]
    for to in named:
        recipe.carry(key, to, str(recipe.value(key)))
    return bool(named)
