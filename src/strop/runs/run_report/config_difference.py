"""Which settings of a run differ from the defaults of its command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strop.base_config import to_tree, validate_section
from strop.config import TRAINING_RUNS, ConfigError, load_config
from strop.data.data_config import DataEntryConfig
from strop.monitoring.run_lines import flatten_settings

ENTRIES = ("train", "validation")
# What every configuration has to say; without it there are no defaults to compare with.
REQUIRED = ("policy.model_name", "teacher.model_name")


@dataclass(frozen=True)
class ChangedSetting:
    """A key whose value is not the default. ``default`` is None where the schema has no such key, as for options of an algorithm."""

    key: str
    value: Any
    default: Any
    known: bool = True


def find_section(config: Mapping[str, Any]) -> str | None:
    """Return the command of a configuration: the section of training that it has."""
    return next((name for name in TRAINING_RUNS if name in config), None)


def list_changed_settings(config: Mapping[str, Any]) -> list[ChangedSetting] | None:
    """Return the settings that differ from the defaults, in the order of the configuration; None for one of no known command."""
    section = find_section(config)
    if section is None:
        return None
    own = flatten_settings(config)
    given = [f"{key}={own[key]}" for key in REQUIRED if own.get(key) is not None]
    defaults = _load_defaults(section, given)
    if defaults is None:
        return None
    defaults |= _load_entry_defaults(config)
    return [
        ChangedSetting(key, _shorten_entries(key, value), defaults.get(key), key in defaults)
        for key, value in own.items()
        if (key not in defaults and value is not None) or (key in defaults and defaults[key] != value)
    ]


def _load_entry_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the keys of an entry, for each part of the data that is one entry."""
    data = config.get("data")
    parts = [part for part in ENTRIES if isinstance(data, Mapping) and isinstance(data.get(part), Mapping)]
    return {f"data.{part}.{key}": value for part in parts for key, value in _entry_defaults().items()}


def _entry_defaults() -> dict[str, Any]:
    return flatten_settings(to_tree(validate_section(DataEntryConfig, {})))


def _shorten_entries(key: str, value: Any) -> Any:
    """Return a list of entries without their defaults, and any other value as it is."""
    if key not in [f"data.{part}" for part in ENTRIES] or not isinstance(value, list):
        return value
    usual = _entry_defaults()
    flat = [flatten_settings(entry) if isinstance(entry, Mapping) else {"": entry} for entry in value]
    return [{name: each for name, each in entry.items() if usual.get(name) != each} for entry in flat]


def _load_defaults(section: str, given: list[str]) -> dict[str, Any] | None:
    for overrides in (given, ["policy.model_name=model", "teacher.model_name=self"], ["policy.model_name=model"]):
        try:
            loaded = load_config(None, overrides, root=TRAINING_RUNS[section], check=False)
        except (ConfigError, ValueError):
            continue
        return flatten_settings(to_tree(loaded.config))
    return None
