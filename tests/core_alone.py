"""Run pytest on the core alone: a copy of the package without ``strop/extensions``, which every process of the tests imports.

    python tests/core_alone.py -q -n 2 -m "not gpu and not exhaustive"

Arguments go to pytest; tests/extensions, tests/project, tests/browser and tests/gpu are left out. Tests that were skipped because they need
an extension are written to build/needs_extensions.txt, for a session with the whole package: ``pytest @build/needs_extensions.txt``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEED_EXTENSIONS = ROOT / "build" / "needs_extensions.txt"


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="strop-core-") as folder:
        # with what was compiled before: it holds for copies too, whose files have the times of the originals
        shutil.copytree(ROOT / "src" / "strop", Path(folder, "strop"), ignore=shutil.ignore_patterns("extensions"))
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        left_out = [f"--ignore={ROOT / 'tests' / name}" for name in ("extensions", "project", "browser", "gpu")]
        command = [sys.executable, "-m", "pytest", *left_out, *arguments]
        NEED_EXTENSIONS.parent.mkdir(exist_ok=True)
        NEED_EXTENSIONS.write_text("")
        environment = {**os.environ, "PYTHONPATH": path, "STROP_NEED_EXTENSIONS": str(NEED_EXTENSIONS)}
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
