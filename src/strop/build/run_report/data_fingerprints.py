"""Fingerprints of the data of a run: whether another run, later or elsewhere, trained on the same."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from strop.config import TrainingRunConfig
from strop.data.data_config import DataEntryConfig
from strop.data.sources.local_copies import find_copy
from strop.data.sources.records import DataError

WHOLE_BYTES = 64 << 20  # larger files are read at both ends
END_BYTES = 8 << 20


def fingerprint_data(config: TrainingRunConfig) -> dict[str, str]:
    """Return what each entry of the data holds, by its place: ``data.train[0]``. A fingerprint that cannot be taken says why."""
    parts = {"train": config.data.train, "validation": config.data.validation}
    return {
        f"data.{part}[{index}]": describe_entry(entry)
        for part, entries in parts.items()
        for index, entry in enumerate(entries or ())
    }


def describe_entry(entry: DataEntryConfig) -> str:
    if entry.rows is not None:
        return _describe_rows(entry.rows)
    name = entry.dataset_name
    if name is None:
        return f"tasks that the environment {entry.env_name or ''} makes from the seed".replace("  ", " ")
    try:
        if entry.is_file:
            return f"{name}: {hash_file(Path(name))}"
        with suppress(DataError):
            copy = find_copy(name)
            if copy is not None:
                return f"{name}: local copy, {_hash_folder(copy)}"
    except OSError as error:
        return f"{name}: not read ({error.strerror})"
    return f"{name}: by its name and the revision in the configuration"


def hash_file(path: Path) -> str:
    """Return the size of a file and a SHA-256 of its content: of all of it, or of both ends and the size if it is large."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            while block := file.read(1 << 20):
                digest.update(block)
            return f"{size:,} bytes, sha256 {digest.hexdigest()[:16]}"
        digest.update(str(size).encode())
        digest.update(file.read(END_BYTES))
        file.seek(size - END_BYTES)
        digest.update(file.read(END_BYTES))
    return f"{size:,} bytes, sha256 of the size and both ends {digest.hexdigest()[:16]}"


def _hash_folder(folder: Path) -> str:
    """Return a digest of the names and sizes of the files in a folder, which may be too large to read."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    listed = [[str(path.relative_to(folder)), path.stat().st_size] for path in files]
    return f"{len(files)} files, sha256 of names and sizes {hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]}"


def _describe_rows(rows: Any) -> str:
    fingerprint = getattr(rows, "_fingerprint", None)  # of a datasets.Dataset
    if fingerprint is None:
        text = json.dumps(list(rows), default=str, sort_keys=True).encode(errors="replace")
        fingerprint = f"sha256 {hashlib.sha256(text).hexdigest()[:16]}"
    return f"{len(rows):,} rows in memory, {fingerprint}"
