"""Files of the tests are in memory only where there is room for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import files_in_memory
from support.files_in_memory import choose_root


def write_meminfo(folder: Path, kilobytes: int) -> Path:
    file = folder / "meminfo"
    file.write_text(f"MemTotal: 99 kB\nMemAvailable: {kilobytes} kB\n")
    return file


def test_a_folder_with_room_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_in_memory, "ROOM", 1024)
    assert choose_root(tmp_path, write_meminfo(tmp_path, 2)) == tmp_path


def test_little_memory_or_none_that_is_told_leaves_the_choice_to_pytest(tmp_path: Path) -> None:
    assert choose_root(tmp_path, write_meminfo(tmp_path, 1_000_000)) is None
    assert choose_root(tmp_path, tmp_path / "missing") is None
    assert choose_root(tmp_path / "missing", write_meminfo(tmp_path, 99_000_000)) is None
