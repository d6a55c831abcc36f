"""The ``step_N`` folders in a checkpoint folder."""

from __future__ import annotations

import re
from pathlib import Path

_STEP = re.compile(r"step_(0|[1-9][0-9]*)")  # step_05 is not a checkpoint of step 5: a run would write step_5 next to it


def list_steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, in order; empty if there is no folder."""
    if not folder.is_dir():
        return []
    matches = (_STEP.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)
