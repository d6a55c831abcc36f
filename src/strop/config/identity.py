"""The identity of a run: each key's role when a run is resumed, and the differences between two configurations.

A section names its keys in ``identity_keys`` (a change would make it another run, and is refused) and ``unrelated_keys`` (a
change does not affect training: folders, logs, devices, how a batch is cut). Every other key is applied: a change takes effect
from the next step on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strop.base_config import BaseConfig, fields_of, section_model, to_tree
from strop.config.source.keys import entry_model, is_entry_list
from strop.safety.printable import redact_secrets

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
