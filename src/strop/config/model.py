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

Path = tuple[str, ...]
ModelT = TypeVar("ModelT", bound="Model")


def follows(*targets: str, alone: Any, description: str, **limits: Any) -> Any:
    """Declare a field with another key's value, or the product of several, as default.

    ``standalone`` is the default in a section that is built on its own; ``...`` makes the key required there.
    """
    return Field(default=alone, description=description, json_schema_extra={"follows": list(targets)}, **limits)


def subsection(model: type[Model]) -> Any:
    """Declare a field that is a section."""
    return Field(default_factory=model)


def targets_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the targets of a field that follows others, as written; empty for other fields."""
    extra = field.json_schema_extra
    return tuple(cast("list[str]", extra["follows"])) if isinstance(extra, dict) and "follows" in extra else ()


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        return fill(cls, values) if isinstance(values, Mapping) else values


def section(field: FieldInfo) -> type[Model] | None:
    """Return the model of a field that is a section; None for a plain value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Model) else None


def is_section(model: type[Model], name: str) -> bool:
    return name in model.model_fields and section(model.model_fields[name]) is not None


def followers(model: type[Model], prefix: Path = ()) -> Iterator[tuple[Path, tuple[Path, ...]]]:
    """Yield (key, keys it follows) for every pair inside ``model``, outer keys first."""
    deeper: list[tuple[Path, type[Model]]] = []
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        if (inner := section(field)) is not None:
            deeper.append((path, inner))
        targets = [absolute(path, target) for target in targets_of(field)]
        if targets and all(target is not None for target in targets):
            yield path, tuple(cast("list[Path]", targets))
    for path, inner in deeper:
        yield from followers(inner, path)


def absolute(path: Path, target: str) -> Path | None:
    """Return ``("length",)`` for ``("generation", "max_new_tokens")`` and ``..length``; None if the target is outside the model."""
    name = target.lstrip(".")
    climb = len(target) - len(name)
    return (*path[: len(path) - climb], *name.split(".")) if climb <= len(path) else None


def fill(model: type[Model], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the values with every key that follows another filled in.

    A null section (``logger:`` with nothing under it) is a section with no key set.
    """
    tree = {name: value for name, value in copy_tree(values).items() if value is not None or not is_section(model, name)}
    following = dict(followers(model))

    def value_at(path: Path) -> Any:
        found = read(tree, path)
        if found is None and path in following:
            found = product([value_at(target) for target in following[path]])
        return default_at(model, path) if found is None else found

    for path in following:
        if read(tree, path) is None and (found := value_at(path)) is not None:
            write(tree, path, found)
    return tree


def copy_tree(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy_tree(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def read(tree: Any, path: Path) -> Any:
    """Return the value at a path through mappings and models; None if there is none."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)
    return tree


def write(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Set a value, creating sections on the way. Does nothing below a value that is not a dict."""
    for name in path[:-1]:
        if tree.get(name) is None:
            tree[name] = {}
        if not isinstance(tree[name], dict):
            return
        tree = tree[name]
    tree[path[-1]] = value


def default_at(model: type[Model], path: Path) -> Any:
    """Return the schema's default at a path; None if it has none."""
    for name in path[:-1]:
        inner = section(model.model_fields[name]) if name in model.model_fields else None
        if inner is None:
            return None
        model = inner
    field = model.model_fields.get(path[-1])
    return None if field is None or field.is_required() or section(field) else field.get_default(call_default_factory=True)


def product(values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    return math.prod(values) if all(isinstance(value, int) for value in values) else None
