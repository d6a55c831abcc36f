"""Which files of tests are collected, and which of them are one piece of work."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from support.schedule import TOGETHER

ROOT = Path(__file__).parents[2]


def test_every_file_of_tests_is_collected(request: pytest.FixtureRequest) -> None:
    config, tests = request.config, ROOT / "tests"
    patterns = config.getini("python_files")

    def is_ignored(path: Path) -> bool:
        return bool(config.hook.pytest_ignore_collect(collection_path=path, config=config))

    files = sorted(tests.rglob("test_*.py"))
    assert len(files) > 300
    folders = {folder for file in files for folder in file.parents if folder.is_relative_to(tests)}
    assert [folder for folder in sorted(folders) if is_ignored(folder)] == []
    assert [file for file in files if is_ignored(file) or not any(fnmatchcase(file.name, each) for each in patterns)] == []


def test_the_files_and_folders_that_are_one_piece_of_work_exist() -> None:
    assert sorted(file for file in {*TOGETHER, *TOGETHER.values()} if not (ROOT / file).exists()) == []
