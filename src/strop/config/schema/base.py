"""The base class of every section: a frozen pydantic model that forbids unknown keys.

A key may *follow* another: ``max_new_tokens`` follows ``..max_total_sequence_length`` and takes its value unless it is set
(null counts as not set). Targets are written as in interpolations: one dot is the same section, two dots the parent section.
The outermost section that contains both keys fills in the value before validation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

KeyPath = tuple[str, ...]
ModelT = TypeVar("ModelT", bound="BaseConfig")


def follows(*targets: str, standalone: Any, description: str, **limits: Any) -> Any:
    """Declare a field with another key's value, or the product of several, as default.

    ``standalone`` is the default in a section that is built on its own; ``...`` makes the key required there.
    """
    return Field(default=standalone, description=description, json_schema_extra={"follows": list(targets)}, **limits)


def subsection(model: type[BaseConfig]) -> Any:
    """Declare a field that is a section."""
    return Field(default_factory=model)


def followed_keys(field: FieldInfo) -> tuple[str, ...]:
    """Return the targets of a field that follows others, as written; empty for other fields."""
    extra = field.json_schema_extra
    return tuple(cast("list[str]", extra["follows"])) if isinstance(extra, dict) and "follows" in extra else ()


class BaseConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _fill_followers(cls, values: Any) -> Any:
        return fill_followers(cls, values) if isinstance(values, Mapping) else values


def section_model(field: FieldInfo) -> type[BaseConfig] | None:
    """Return the model of a field that is a section; None for a plain value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseConfig) else None


def is_section(model: type[BaseConfig], name: str) -> bool:
    return name in model.model_fields and section_model(model.model_fields[name]) is not None


def iter_followers(model: type[BaseConfig], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, tuple[KeyPath, ...]]]:
    """Yield (key, keys it follows) for every pair inside ``model``, outer keys first."""
    deeper: list[tuple[KeyPath, type[BaseConfig]]] = []
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        if (inner := section_model(field)) is not None:
            deeper.append((path, inner))
        targets = [absolute_path(path, target) for target in followed_keys(field)]
        if targets and all(target is not None for target in targets):
            yield path, tuple(cast("list[KeyPath]", targets))
    for path, inner in deeper:
        yield from iter_followers(inner, path)


def absolute_path(path: KeyPath, target: str) -> KeyPath | None:
    """Return ``("length",)`` for ``("generation", "max_new_tokens")`` and ``..length``; None if the target is outside the model."""
    name = target.lstrip(".")
    levels = len(target) - len(name)
    return (*path[: len(path) - levels], *name.split(".")) if levels <= len(path) else None


def fill_followers(model: type[BaseConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the values with every key that follows another filled in.

    A null section (``logger:`` with nothing under it) is a section with no key set.
    """
    tree = {name: value for name, value in copy_tree(values).items() if value is not None or not is_section(model, name)}
    following = dict(iter_followers(model))

    def value_at(path: KeyPath) -> Any:
        result = get_at(tree, path)
        if result is None and path in following:
            result = product([value_at(target) for target in following[path]])
        return get_default_at(model, path) if result is None else result

    for path in following:
        if get_at(tree, path) is None and (result := value_at(path)) is not None:
            set_at(tree, path, result)
    return tree


def copy_tree(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy_tree(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def get_at(tree: Any, path: KeyPath) -> Any:
    """Return the value at a path through mappings and models; None if there is none."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)
    return tree


def set_at(tree: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set a value, creating sections on the way. Does nothing below a value that is not a dict."""
    for name in path[:-1]:
        if tree.get(name) is None:
            tree[name] = {}
        if not isinstance(tree[name], dict):
            return
        tree = tree[name]
    tree[path[-1]] = value


def get_default_at(model: type[BaseConfig], path: KeyPath) -> Any:
    """Return the schema's default at a path; None if it has none."""
    for name in path[:-1]:
        inner = section_model(model.model_fields[name]) if name in model.model_fields else None
        if inner is None:
            return None
        model = inner
    field = model.model_fields.get(path[-1])
    return None if field is None or field.is_required() or section_model(field) else field.get_default(call_default_factory=True)


def product(values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    return math.prod(values) if all(isinstance(value, int) for value in values) else None
