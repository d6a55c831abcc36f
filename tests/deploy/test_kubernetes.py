"""The script that lets a run save before its pods go."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"


@dataclass(frozen=True)
class Fields:
    """A mapping with these keys and no other."""

    required: dict[str, Any]
    optional: dict[str, Any]


def fields(required: dict[str, Any], **optional: Any) -> Fields:
    return Fields(required, optional)


def test_stopping_waits_for_the_run_to_save_and_tells_the_run_alone(tmp_path: Path) -> None:
    script = tmp_path / "run_it_for_a_test.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "child = os.fork()\n"  # has the run's command line, as forked engines have
        "name = 'run' if child else 'fork'\n"
        "def save(*_):\n"
        "    time.sleep(1 if child else 0)\n"
        f"    pathlib.Path({str(tmp_path)!r}, name + '-told').touch()\n"
        "    if child: os.kill(child, signal.SIGKILL)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        f"pathlib.Path({str(tmp_path)!r}, name + '-ready').touch()\n"
        "time.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, str(script)])
    while not ((tmp_path / "run-ready").exists() and (tmp_path / "fork-ready").exists()):
        time.sleep(0.05)
    pattern = r"(strop|run_[a-z_]+\.py)"
    text = (FOLDER / "stop-run.sh").read_text()
    assert pattern in text and re.fullmatch(pattern, script.name)
    text = text.replace(pattern, r"run_it_for_a_test\.py")  # in a pod there is one run; here it must not find those of others
    assert subprocess.Popen(["bash", "-c", text, "stop-run.sh", "30"]).wait(60) == 0
    assert (tmp_path / "run-told").exists() and not (tmp_path / "fork-told").exists()
    assert run.wait(10) == 0
