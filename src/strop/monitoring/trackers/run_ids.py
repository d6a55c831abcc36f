"""A service's id of a run, stored in the log folder so that a resumed run stays one run there."""

from __future__ import annotations

import secrets
from pathlib import Path

from strop.storage.files import atomic_write


def read_run_id(log_dir: Path, file: str) -> str | None:
    """Return the id in ``<log_dir>/<file>``; None if there is none."""
    path = log_dir / file
    return path.read_text(encoding="utf-8").strip() or None if path.exists() else None


def store_run_id(log_dir: Path, file: str, run_id: str) -> str:
    log_dir.mkdir(parents=True, exist_ok=True)
    with atomic_write(log_dir / file) as temporary:
        temporary.write_text(run_id + "\n", encoding="utf-8")
    return run_id


def create_run_id(log_dir: Path, file: str, bytes: int = 4) -> str:
    """Create and store an id before the service uses it: a kill in between wastes an id but never creates a second run."""
    return store_run_id(log_dir, file, secrets.token_hex(bytes))
