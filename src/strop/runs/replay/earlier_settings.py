"""The settings of a step that a run trained before it was continued with others."""

from __future__ import annotations

import json
from pathlib import Path

from strop.config.identity import flatten
from strop.monitoring.config_history import read_changes, read_first_config


def find_earlier_settings(folder: Path, step: int) -> tuple[str, ...]:
    """Return the overrides that make the newest configuration in a log folder that of ``step``."""
    known = {key for key, _ in flatten(read_first_config(folder))}
    then: dict[str, object] = {}
    for first, changed in read_changes(folder):
        for key, (old, _) in changed.items() if first > step else ():
            then.setdefault(key, old)
    # A key that the first configuration lacks was added to a section that takes any key: it is removed, not set to null.
    return tuple(f"~{key}" if old is None and key not in known else f"{key}={json.dumps(old)}" for key, old in then.items())
