"""``timeline.jsonl`` in the log folder: a line a step, with what its samples waited for and when.

    {"step":12,"began":1764422400.1,"seconds":8.1,"phases":[["generation",0,5210]],"syncs":[["engine-0 to take version 12",7400,7710]],
     "groups":[{"group":48,"kept":true,"from":-310,"to":4870,"samples":{"0":[["engine 1",-300,4100],["rewards",4102,4130]]}}],
     "more":0,"lost":0,"collected":5210,"seconds_of":{"engine":31.2,"rewards":0.1,"waiting":1.9,"ended":9.7},"last":[48,0,4130],"median":2200}

``began`` is Unix time. Times in lists are milliseconds after it, so what began in an earlier step is negative. The spans of a sample do not
overlap; the first word of each is its kind. ``more`` samples are not listed, and ``lost`` waits were not kept; ``seconds_of``, ``last``
(group, sample and end) and ``median`` (of the ends) are about all samples. It imports no torch.
"""

from __future__ import annotations

import json
import re
from collections import deque
from pathlib import Path
from typing import Any

from strop.storage.files import atomic_write

TIMELINE_FILE = "timeline.jsonl"
_KEYS = {"began", "seconds", "phases", "syncs", "groups", "more", "lost", "collected", "seconds_of", "last", "median"}
_STEP = re.compile(rb'\{"step":(\d{1,15}),.*\}\n', re.DOTALL)  # a whole line


def append_line(path: Path, values: dict[str, Any]) -> None:
    """Append a step; ``step`` is its first key. Raises OSError."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values, separators=(",", ":"), allow_nan=False) + "\n")


def cut_timeline(path: Path, step: int) -> None:
    """Remove the lines of later steps, and what a kill left half-written."""
    if not path.exists():
        return
    with path.open("rb") as file, atomic_write(path) as temporary, temporary.open("wb") as kept:
        kept.writelines(line for line in file if (found := _STEP.fullmatch(line)) and int(found[1]) <= step)


def read_timeline(path: Path, until: int | None = None, count: int = 1) -> dict[str, Any]:
    """Return ``steps``, the last ``count`` steps up to ``until``, and the ``first`` and ``last`` of the file, None without one.

    Raises OSError, and ValueError for a line that is no JSON.
    """
    if not path.exists():
        return {"first": None, "last": None, "steps": []}
    known: list[int] = []
    lines: deque[bytes] = deque(maxlen=count)
    with path.open("rb") as file:
        for line in file:
            if found := _STEP.fullmatch(line):
                known.append(int(found[1]))
                if until is None or known[-1] <= until:
                    lines.append(line)
    steps = [line for line in map(json.loads, lines) if line.keys() >= _KEYS]  # without those of another version
    return {"first": min(known, default=None), "last": max(known, default=None), "steps": steps}
