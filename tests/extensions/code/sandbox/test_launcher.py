"""How workers are started, and what the page about security says of them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from strop.environments.scoring import scoring_pool
from strop.extensions.code.sandbox import launcher
from strop.extensions.code.sandbox.base import Limits
from strop.extensions.code.sandbox.launcher import SandboxWorker
from strop.extensions.code.sandbox.sandbox_check import PROMISES
from strop.extensions.code.sandbox.sandbox_config import SandboxConfig
from strop.safety.confinement import isolate_command

PAGE = (Path(__file__).parents[4] / "docs" / "security.md").read_text(encoding="utf-8")


def test_the_page_promises_what_is_checked() -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
    header = next(cells for cells in lines if cells[0] == "promise")
    levels = [name.strip("`") for name in header[2:]]
    assert levels == list(PROMISES)
    for place, level in enumerate(levels):
        promised = {cells[0] for cells in lines if len(cells) == len(header) and cells[2 + place] == "yes"}
        assert promised == set(PROMISES[level]), level  # type: ignore[index]


def list_shown_below_tmp(*readable: str) -> list[str]:
    """What an isolated command sees in /tmp: the way to what is ``readable`` there, and to an interpreter that lies there."""
    return sorted({Path(folder).parts[2] for folder in (sys.base_prefix, sys.prefix, *readable) if folder.startswith("/tmp/")})


def test_an_isolated_command_finds_its_libraries_and_nothing_else(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    seen = f"[os.path.exists('/etc/passwd'), os.path.exists({str(secret)!r}), *sorted(os.listdir('/tmp'))]"
    command = isolate_command([sys.executable, "-c", f"import os; print({seen})"], [sys.prefix])
    wanted = [False, False, *list_shown_below_tmp()]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{wanted}\n"


def test_an_isolated_command_finds_libraries_below_tmp_and_not_what_lies_beside_them() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        (folder / "secret").write_text("x")
        (folder / "libraries").mkdir()
        (folder / "libraries" / "small_library.py").write_text("ANSWER = 42")
        (folder / "link").symlink_to("libraries")
        source = (
            f"import os, sys; sys.path = [{name + '/link'!r}, *sys.path]; import small_library; print(small_library.ANSWER,"
            f" sorted(os.listdir('/tmp')) == {list_shown_below_tmp(name)}, os.listdir({name!r}), os.access({name + '/link'!r}, os.W_OK))"
        )
        command = isolate_command([sys.executable, "-c", source], [sys.prefix, name + "/link"])
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.stdout, answer.stderr) == ("42 True ['link'] False\n", "")


def test_workers_read_libraries_by_the_names_that_python_has_for_them(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "link").symlink_to("site-packages")
    folders = scoring_pool._find_libraries([str(tmp_path / "link"), str(tmp_path / "missing"), "/", "/tmp"])
    assert {str(tmp_path / "link"), str(tmp_path / "site-packages"), sys.prefix} <= set(folders)
    assert not {"/", "/tmp", str(tmp_path / "missing")} & set(folders)


def test_programs_have_libraries_that_lie_where_their_own_folders_are() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)  # programs are another user
        Path(name, "small_library.py").write_text("ANSWER = 42")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launcher.sysconfig, "get_paths", lambda: {"purelib": name, "platlib": name})
            worker = SandboxWorker(SandboxConfig(site_packages=True))
        try:
            limits = asdict(Limits())
            request = {"session": False, "language": "python", "stdin": "", "files": {}, "limits": limits}
            source = "import os, small_library; print(small_library.ANSWER, os.listdir('/tmp'))"
            answer = worker.call({**request, "source": source}, 20)
        finally:
            worker.close()
    assert (answer["stdout"], answer["stderr"]) == ("42 ['main.py']\n", "")


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
