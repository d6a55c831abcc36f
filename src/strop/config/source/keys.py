"""The keys of a schema: their paths, types and defaults."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from strop.base_config import BaseConfig, KeyPath, default_of_field, fields_of, followed_keys, section_model
from strop.learner.torch.optimizer_config import SchedulerConfig

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
