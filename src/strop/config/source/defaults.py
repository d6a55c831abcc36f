"""The schema's defaults under the values of a configuration."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, cast

from strop.base_config import BaseConfig, KeyPath, fields_of, followed_keys, section_model
from strop.config.source import keys
from strop.config.source.interpolation import resolve_interpolations
from strop.config.source.yaml_source import ConfigSource


def resolve_source(source: ConfigSource, model: type[BaseConfig]) -> tuple[Mapping[str, Any], Mapping[KeyPath, str]]:
    """Return a source's settings on top of the schema's defaults, resolved, and an error for each value that cannot be resolved.

    Both are shared: copy before changing them.
    """
    return _resolve(source, cast("Any", model))


@functools.lru_cache(maxsize=8)  # a translation and its validation resolve the same source
def _resolve(source: ConfigSource, model: type[BaseConfig]) -> tuple[Mapping[str, Any], Mapping[KeyPath, str]]:
    return resolve_interpolations(add_defaults(source.values, model))


def add_defaults(values: Mapping[str, Any], model: type[BaseConfig]) -> dict[str, Any]:
    """Return values with the schema's defaults for missing keys, so that ``${...}`` can refer to any key."""
    default = keys.default_values(model)
    tree = dict(default)
    for name, value in values.items():
        tree[name] = value
        field = fields_of(model).get(name)
        if field is None:
            continue
        if (inner := section_model(field)) is not None:
            if value is None or isinstance(value, Mapping):
                tree[name] = add_defaults(value or {}, inner)
        elif value is None and followed_keys(field):
            tree[name] = default[name]  # null requests the value of the key that this one follows
        elif isinstance(value, Mapping) and not keys.is_entry_list(field) and (entry := keys.entry_model(field)):
            tree[name] = {
                alias: add_defaults(options or {}, entry) if options is None or isinstance(options, Mapping) else options
                for alias, options in value.items()
            }
    return tree
