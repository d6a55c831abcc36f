"""A confined process computes, and reads, and does nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")

CONFINED = """
import os, socket, signal, sys
from strop.safety.confinement import confine
confine()
try:
    {action}
except (OSError, ValueError):  # resource.setrlimit makes a ValueError of EPERM
    print("refused")
else:
    print("done")
"""


def confined(action: str, folder: object) -> str:
    script = CONFINED.format(action=action)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=str(folder)).stdout.strip()


@pytest.mark.parametrize(
    "action",
    [
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "open('new', 'w')",
        "open('file', 'a')",
        "open('file', 'r+')",
        "os.remove('file')",
        "os.rename('file', 'other')",
        "os.truncate('file', 0)",
        "os.mkdir('folder')",
        "os.chmod('file', 0)",
        "os.symlink('file', 'link')",
        "socket.socket()",
        "os.kill(os.getppid(), 0)",
        "signal.setitimer(signal.ITIMER_PROF, 0)",
        "__import__('resource').setrlimit(__import__('resource').RLIMIT_NOFILE, (9, 9))",
    ],
)
def test_a_confined_process_is_refused(action, tmp_path):
    (tmp_path / "file").write_text("text")
    assert confined(action, tmp_path) == "refused"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    assert (tmp_path / "file").read_text() == "text"


def test_a_confined_process_imports_and_computes(tmp_path):
    (tmp_path / "file").write_text("text")
    assert (
        confined("import decimal, fractions, uuid; assert open('file').read() == 'text'; sum(range(10**6))", tmp_path) == "done"
    )
