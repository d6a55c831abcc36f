"""How workers are started, and what the page about security says of them."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from security.hostile_programs import PROGRAMS
from strop.environments.scoring import scoring_pool
from strop.sandbox.launcher import isolate_command
from strop.sandbox.sandbox_check import PROMISES

PAGE = (Path(__file__).parents[3] / "docs" / "security.md").read_text(encoding="utf-8")


def test_the_page_promises_what_is_checked() -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
    header = next(cells for cells in lines if cells[0] == "promise")
    levels = [name.strip("`") for name in header[2:]]
    assert levels == list(PROMISES)
    for place, level in enumerate(levels):
        promised = {cells[0] for cells in lines if len(cells) == len(header) and cells[2 + place] == "yes"}
        assert promised == set(PROMISES[level]), level  # type: ignore[index]


def test_the_page_counts_the_hostile_programs() -> None:
    found = re.search(r"with (\d+) hostile programs", PAGE)
    assert found
    assert int(found[1]) <= len(PROGRAMS) < int(found[1]) + 10


def test_an_isolated_command_finds_its_libraries_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    source = (
        f"import os, sys; print(os.path.exists('/etc/passwd'), os.path.exists({str(tmp_path / 'secret')!r}), os.listdir('/tmp'))"
    )
    command = isolate_command([sys.executable, "-c", source], [sys.prefix])
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False False []\n"


def test_answers_are_scored_in_a_process_that_sees_no_files_of_the_machine() -> None:
    worker = scoring_pool._start_worker(isolated=True)
    try:
        deadline = time.monotonic() + 20
        while (seen := _inner_root(worker.pid)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert seen is not None
        assert "passwd" not in seen
    finally:
        scoring_pool._stop_worker(worker)


def _inner_root(pid: int) -> set[str] | None:
    """What the process in the namespace sees in /etc; None before it runs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in children:
        if (
            "scoring_worker" in Path(f"/proc/{child}/cmdline").read_text()
            and "bwrap" not in Path(f"/proc/{child}/comm").read_text()
        ):
            return {path.name for path in Path(f"/proc/{child}/root/etc").iterdir()}
    return None
