"""The folder for files shared by one user's runs: compiled code, which is rebuilt if missing."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """Return the folder of Strop in the user's cache, which may not exist yet: ``XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strop"
