"""Paths for display."""

from __future__ import annotations

from pathlib import Path


def shorten_path(path: Path) -> Path:
    """Return an absolute path relative to the working directory if it lies in it. Valid until the directory changes."""
    try:
        return path.relative_to(Path.cwd())
    except (ValueError, OSError):  # outside; or the working directory was removed
        return path
