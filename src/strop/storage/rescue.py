"""The last resort for records that have no room in their folder when a run ends."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path


def rescue_files(files: Mapping[str, bytes]) -> Path | None:
    """Write files to a new folder among the temporary files, which this user alone can read. Return None if there is no room either."""
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="strop-rescued-"))
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return None
    return folder
