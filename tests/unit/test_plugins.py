"""What packages declare, and Strop itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import strop
from support.declared_packages import declare, finding

PROJECT = Path(strop.__file__).parents[2] / "pyproject.toml"
SHOW = "from strop import plugins; print(*sorted(plugins.declared('transports')), *sorted(plugins.declared('commands')))"


def run(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=finding(*folders), capture_output=True, text=True, timeout=60)


def test_what_is_declared_but_not_installed_is_not_there(tmp_path: Path) -> None:
    declare(tmp_path, "half", "[strop.transports]\nsmoke = nowhere_at_all.signals:make\npigeon = pigeons:make\n")
    (tmp_path / "pigeons.py").write_text("make = print\n")
    found = run(SHOW, tmp_path).stdout.split()
    assert "pigeon" in found and "memory" in found and "smoke" not in found


def test_one_name_for_two_things_is_an_error_that_names_both(tmp_path: Path) -> None:
    declare(tmp_path, "doves", "[strop.transports]\npigeon = pigeons:make\n")
    declare(tmp_path, "hawks", "[strop.transports]\npigeon = pigeons:other\n")
    (tmp_path / "pigeons.py").write_text("make = other = print\n")
    assert "two packages declare 'pigeon' in strop.transports: pigeons:" in run(SHOW, tmp_path).stderr


@pytest.mark.skipif(not PROJECT.is_file(), reason="Strop is not in a checkout here")
def test_a_checkout_declares_what_its_project_file_says_whatever_an_earlier_installation_wrote_down(tmp_path: Path) -> None:
    declare(tmp_path, "strop", "[strop.commands]\nlong_gone = strop.gone:GONE\n")
    found = run(SHOW, PROJECT.parent / "src", tmp_path).stdout.split()
    assert {"memory", "view", "plan"} <= set(found) and "long_gone" not in found
