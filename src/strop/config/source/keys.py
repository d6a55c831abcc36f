"""The keys of a schema: paths, types, defaults, the nearest to an unknown one, and the role of each when a run is resumed."""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from strop.base_config import BaseConfig, KeyPath, default_of_field, fields_of, followed_keys, section_model, to_tree
from strop.learner.torch.optimizer_config import SchedulerConfig
from strop.safety.printable import redact_secrets

TYPE_NAMES = {int: "int", float: "float", str: "str", bool: "true or false", type(None): "null"}
LIMIT_SIGNS = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))


@dataclass(frozen=True)
class SchemaKey:
    """One key of a schema."""

    path: KeyPath
    field: FieldInfo

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def type(self) -> str:
        return format_type(self.field)

    @property
    def default(self) -> Any:
        """The default as written in YAML: an interpolation for a key that follows others."""
        return follows_interpolation(self.field) or default_of_field(self.field)

    @property
    def required(self) -> bool:
        return self.field.is_required() and not followed_keys(self.field)


def iter_keys(model: type[BaseConfig], prefix: KeyPath = (), *, repeated: bool = False) -> Iterator[SchemaKey]:
    """Yield every key below ``model`` except sections.

    ``repeated`` adds the keys of list entries, of ``<alias>``, and of mappings with a default, such as an optimizer's lr.
    """
    for name, field in fields_of(model).items():
        if field.exclude:  # not a separate key
            continue
        path = (*prefix, name)
        if (inner := section_model(field)) is not None:
            yield from iter_keys(inner, path, repeated=repeated)
            continue
        yield SchemaKey(path, field)
        if repeated and (item := entry_model(field)) is not None:
            yield from iter_keys(item, path if is_entry_list(field) else (*path, "<alias>"), repeated=True)
        if repeated and isinstance(default := SchemaKey(path, field).default, dict):
            yield from (SchemaKey((*path, inner_name), field) for inner_name in default)


def entry_model(field: FieldInfo) -> type[BaseConfig] | None:
    """Return the model of the entries of a list or mapping, if it has one."""
    for argument in _iter_type_arguments(field.annotation):
        if isinstance(argument, type) and issubclass(argument, BaseConfig) and argument is not SchedulerConfig:
            return argument
    return None


def is_entry_list(field: FieldInfo) -> bool:
    return "tuple" in str(field.annotation)


def _iter_type_arguments(annotation: Any) -> Iterator[Any]:
    for argument in typing.get_args(annotation):
        yield argument
        yield from _iter_type_arguments(argument)


def find_field(model: type[BaseConfig], path: Sequence[str]) -> FieldInfo | None:
    """Return the field at a path with list indices (which may be left out) and aliases; None if there is none."""
    if not path or path[0] not in fields_of(model):
        return None
    field, rest = fields_of(model)[path[0]], list(path[1:])
    inner, item = section_model(field), entry_model(field)
    if inner is None and item is not None and rest:
        rest = rest[1:] if rest[0].isdigit() or not is_entry_list(field) else rest
        inner = item
    if not rest:
        return field
    return find_field(inner, rest) if inner is not None else None


def default_values(model: type[BaseConfig]) -> Mapping[str, Any]:
    """Return all defaults, nested. A key that follows others has its interpolation; a required key is absent.

    They are shared: copy before changing them.
    """
    return _default_values(cast("Any", model))


@functools.cache  # for several hundred sections, each of which is requested by every load
def _default_values(model: type[BaseConfig]) -> Mapping[str, Any]:
    tree: dict[str, Any] = {}
    for name, field in fields_of(model).items():
        if (inner := section_model(field)) is not None:
            tree[name] = default_values(inner)
        elif not field.exclude and not SchemaKey((name,), field).required:
            tree[name] = SchemaKey((name,), field).default
    return tree


def default_values_of_entry(model: type[BaseConfig]) -> Mapping[str, Any]:
    """Return the defaults of a named entry, such as ``teachers.math``: one level deeper than a section, so that a key which follows one
    outside of it climbs one level more.
    """
    return _climb_more(default_values(model), 0)


def _climb_more(tree: Mapping[str, Any], depth: int) -> dict[str, Any]:
    def climb(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _climb_more(value, depth + 1)
        leaves = isinstance(value, str) and value.startswith("${." + "." * (depth + 1))
        return f"${{.{value[2:]}" if leaves else value

    return {name: climb(value) for name, value in tree.items()}


def follows_interpolation(field: FieldInfo) -> str | None:
    """Return ``${..a}`` for a field that follows another, else None."""
    return next((f"${{{target}}}" for target in followed_keys(field)), None)


def format_type(field: FieldInfo) -> str:
    text = _format_annotation(field.annotation)
    if limits := _format_limits(field.metadata):
        head, *tail = text.split(" or ", 1)
        text = " or ".join([f"{head} {limits}", *tail])
    return text


def _format_limits(metadata: Iterable[Any]) -> str:
    limits = (
        f"{sign} {getattr(limit, name):g}" for limit in metadata for kind, name, sign in LIMIT_SIGNS if isinstance(limit, kind)
    )
    return " and ".join(limits)


def _format_annotation(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        limits = _format_limits(limit for each in arguments[1:] for limit in getattr(each, "metadata", [each]))
        return f"{_format_annotation(arguments[0])} {limits}".rstrip()
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_format_annotation(argument) for argument in arguments)
    if origin is tuple:
        inner = _format_annotation(arguments[0])
        return "entry or list of entries" if inner == "entry" else f"list of {inner}"
    if origin is dict:
        return "mapping"
    if annotation is SchedulerConfig:
        return "mapping or list of mappings"
    if isinstance(annotation, type) and issubclass(annotation, BaseConfig):
        return "entry"
    return TYPE_NAMES.get(annotation, str(annotation))


CLOSE_WORD = 0.75  # ratio of two words of which one is a misspelling of the other: one letter in four
MOST_PLACES = 3  # a name in more sections, such as enabled, is ambiguous
MOST_LISTED = 12  # keys of a section in a message
SYNONYMS = {"learning_rate": "lr", "lora": "lora_cfg", "peft": "lora_cfg", "num_train_epochs": "max_num_epochs"}


def suggest_keys(path: Sequence[str], root: type[BaseConfig]) -> str:
    """Suggest the meaning of an unknown key, or list the keys of its section."""
    nearest = find_nearest_keys(path, root)
    return f"Did you mean {' or '.join(nearest)}?" if nearest else _list_section(path[:-1], root)


def find_nearest_keys(path: Sequence[str], root: type[BaseConfig]) -> tuple[str, ...]:
    """Return dotted keys that may be meant, best first; empty if no name is close enough."""
    return _find_nearest_keys(tuple(path), root)  # type: ignore[arg-type]  # mypy: as if a section were hashed


@lru_cache(maxsize=4096)  # one message calls it several times
def _find_nearest_keys(path: tuple[str, ...], root: type[BaseConfig]) -> tuple[str, ...]:
    section, name = ".".join(part for part in path[:-1] if not part.isdigit()), path[-1]
    target = f"{section}.{name}" if section else name
    keys = _list_candidates(root, target)
    siblings = [key for key in keys if key.rpartition(".")[0] == section]
    wanted = SYNONYMS.get(name, name)
    same_name = [
        key for key in keys if _name(key) == wanted and ("." in key or len(path) == 2)
    ]  # a section by its name, if indented
    same_name.sort(key=lambda key: -_similarity(key, target))
    if wanted != name:
        return tuple(same_name[:1])
    if misspelled := [key for key in siblings if is_misspelling(name, _name(key))]:
        return (max(misspelled, key=lambda key: _similarity(key, target)),)
    around, _, last = section.rpartition(".")
    if joined := [key for key in keys if is_misspelling(f"{around}.{last}_{name}".lstrip("."), key)]:
        return (joined[0],)  # wandb.enable of wandb_enabled
    if same_name:
        same_name = same_name if section else sorted(same_name, key=lambda key: key.count("."))
        return tuple(same_name[:2]) if len(same_name) <= MOST_PLACES or not section else ()
    if shortened := [key for key in siblings if _is_shortened(name, _name(key))]:
        return (min(shortened, key=len),)
    elsewhere = [key for key in keys if "_" in name and is_misspelling(name, _name(key))]
    return tuple(sorted(elsewhere, key=lambda key: -_similarity(key, target))[:2]) if len(elsewhere) <= MOST_PLACES else ()


def is_misspelling(name: str, other: str) -> bool:
    """Return whether two names differ only slightly: in letter case, underscores, and small misspellings of at most two words."""
    if name.replace("_", "").casefold() == other.replace("_", "").casefold():
        return True
    words, others = name.casefold().split("_"), other.casefold().split("_")
    if len(words) != len(others):
        return False
    pairs = list(zip(words, others, strict=True))
    return sum(word != near for word, near in pairs) <= 2 and all(_is_close(word, near) for word, near in pairs)


def _is_shortened(name: str, other: str) -> bool:
    """Return whether a name omits the end of another, or words of it: num_generations of num_generations_per_prompt."""
    words, others = name.split("_"), other.split("_")
    if len(words) > 1 and len(words) < len(others):
        leading = all(_is_close(word, near) for word, near in zip(words, others, strict=False))
        return leading or all(any(near.startswith(word) for near in others) for word in words)  # max_step of max_num_steps
    return len(name) > 3 and other.startswith(name)


def _is_close(word: str, other: str) -> bool:
    swapped = sorted(word) == sorted(other)  # two swapped letters change short words a lot
    return word == other or (len(word) > 2 and (swapped or _similarity(word, other) >= CLOSE_WORD))


def _list_candidates(root: type[BaseConfig], target: str) -> list[str]:
    """Return all keys and sections, except those that contain the target."""
    return [key for key in _list_keys(root) if not f"{target}.".startswith(f"{key}.")]  # type: ignore[arg-type]


@lru_cache
def _list_keys(root: type[BaseConfig]) -> tuple[str, ...]:
    keys = [key.dotted for key in iter_keys(root, repeated=True)]
    sections = sorted({key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)} - set(keys))
    return (*keys, *sections)


def _list_section(section: Sequence[str], root: type[BaseConfig]) -> str:
    dotted = ".".join(part for part in section if not part.isdigit())
    names = [key[len(dotted) + 1 :] for key in _list_candidates(root, "") if key.rpartition(".")[0] == dotted] if dotted else []
    if not names:
        sections = [name for name in fields_of(root) if name != "run_name"]
        return f"The sections are {', '.join(sections)}. `strop config` lists every key."
    more = f" and {len(names) - MOST_LISTED} more, which `strop config` lists" if len(names) > MOST_LISTED else ""
    return f"The keys of {dotted} are {', '.join(names[:MOST_LISTED])}{more}."


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _similarity(text: str, other: str) -> float:
    return difflib.SequenceMatcher(None, text, other).ratio()


Role = Literal["identity", "applied", "unrelated"]
ROLES: tuple[Role, ...] = ("identity", "unrelated")  # those that sections declare


@dataclass(frozen=True)
class Change:
    """A key whose value differs from the resumed run's."""

    key: str
    role: Role
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} {self.old} -> {self.new}"


def find_changes(old: BaseConfig, new: BaseConfig) -> list[Change]:
    """Return the keys that differ between two configurations of the same kind of run, in alphabetical order."""
    before, after = (dict(flatten(redact_secrets(to_tree(config)))) for config in (old, new))
    differing = (key for key in sorted({*before, *after}) if before.get(key) != after.get(key))
    return [Change(key, role_of(type(new), key.split(".")), before.get(key), after.get(key)) for key in differing]


def flatten(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything in nested values; entries of a list have numbers."""
    entries: Any = None
    if isinstance(tree, Mapping) and tree:
        entries = tree.items()
    elif isinstance(tree, list) and any(isinstance(entry, Mapping) for entry in tree):
        entries = enumerate(tree)
    if entries is None:
        yield key, tree
        return
    for name, value in entries:
        yield from flatten(value, f"{key}.{name}" if key else str(name))


def role_of(model: type[BaseConfig], path: Sequence[str]) -> Role:
    """Return the role of the key at a path below ``model``. A section's declaration for a key applies to everything under it."""
    declared = {name: role for base in model.__mro__ for role in ROLES for name in vars(base).get(f"{role}_keys", ())}
    for depth in range(1, len(path) + 1):
        if (name := ".".join(path[:depth])) in declared:
            return declared[name]
    field, rest = fields_of(model).get(path[0]), list(path[1:])
    inner = None if field is None else section_model(field) or entry_model(field)
    if field is None or inner is None:
        return declared.get("*", "applied")
    if section_model(field) is None and (not is_entry_list(field) or (rest and rest[0].isdigit())):
        rest = rest[1:]  # an alias, or the number of an entry
    return role_of(inner, rest or ["*"])
