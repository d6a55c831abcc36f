"""Which settings of a run differ from their defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from strop.base_config import BaseConfig, followed_keys, to_tree
from strop.storage.files import clean_json


def find_changed(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the dotted keys of settings that differ from the defaults of their kind of run, each with its default; None if it has none."""
    defaults = read_defaults(kind, values)
    unset: tuple[Any, ...] = (None, {}, [])
    return {
        key: defaults.get(key)
        for key, value in values.items()
        if (defaults[key] != value if key in defaults else value not in unset)
    }


def read_defaults(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default of each key; of one that follows another what that has in ``values``. Empty for an unknown kind of run."""
    from strop.config.schema.run_config import TRAINING_RUNS
    from strop.config.source.interpolation import iter_targets
    from strop.config.source.keys import iter_keys

    defaults: dict[str, Any] = {}
    for key in iter_keys(TRAINING_RUNS[kind]) if kind in TRAINING_RUNS else ():
        if key.required:
            continue
        if followed_keys(key.field):
            default = values.get(".".join(next(iter_targets(key.path, key.default))))
        else:
            default = json.loads(json.dumps(clean_json(key.default), default=_write))
        defaults |= dict(flatten({key.dotted: default}))
    return defaults


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting with its dotted key. A list is one value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _write(value: object) -> Any:
    return to_tree(value) if isinstance(value, BaseConfig) else str(value)
