"""The local files of a model: in a folder, or in the hub cache. Nothing is downloaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = "config.json"


def find_local_file(name: str, file: str) -> Path | None:
    """Return the path of a model file; None if it is not on this machine."""
    cache = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub")
    snapshots = Path(cache).expanduser() / f"models--{name.replace('/', '--')}" / "snapshots"
    try:
        return next((path for path in (Path(name).expanduser() / file, *snapshots.glob(f"*/{file}")) if path.is_file()), None)
    except (OSError, ValueError, RuntimeError):  # not a valid path
        return None


def read_local_config(name: str) -> Mapping[str, Any]:
    """Return the ``config.json`` of a model; empty if it is not local, or cannot be read."""
    path = find_local_file(name, CONFIG)
    try:
        values = {} if path is None else json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, Mapping) else {}
