"""Packages that declare entry points, as pip would have installed them, and processes that find them."""

from __future__ import annotations

import os
from pathlib import Path


def declare(folder: Path, package: str, points: str) -> None:
    """Write the metadata of an installed package. ``points``: its entry_points.txt."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)


def finding(*folders: Path) -> dict[str, str]:
    """Return the environment variables of a process that finds the packages in ``folders``, before all others."""
    paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
