"""Packages that declare entry points, as pip would have installed them, and processes that find them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

COMMANDS = """
import contextlib, io, json, sys
from strop import cli

def run(words):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), errors.getvalue()

answers = [run(words) for words in json.loads(sys.argv[1])]
print("\\n" + json.dumps(answers))
"""


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


def run_commands(
    folder: Path, environment: dict[str, str] | None, *commands: Sequence[str], before: str = ""
) -> list[tuple[int, str, str]]:
    """Give commands of ``strop`` one after another to one new process, and return the status, output and errors of each."""
    program = [sys.executable, "-c", before + COMMANDS, json.dumps(commands)]
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [(code, out, errors) for code, out, errors in json.loads(done.stdout.splitlines()[-1])]
