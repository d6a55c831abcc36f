"""``strop init``: what it writes, and that it overwrites nothing."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from strop.cli import main
from strop.config import TRAINING_RUNS, EvalRunConfig, load_config
from strop.extensions.starters.init_command import FOLDER, STARTERS

ROOT = Path(__file__).parents[3]
RECORDED = ("sft", "dpo", "rm")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_without_a_kind_the_kinds_are_listed_and_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {kind} " in listed and starter.meaning in listed for kind, starter in STARTERS.items())
    assert list(Path().iterdir()) == []


def test_another_kind_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "multiturn"]) == 2
    assert "there is no starter 'multiturn'; did you mean 'multi-turn'?" in capsys.readouterr().err


@pytest.mark.parametrize("kind", STARTERS)
def test_the_files_of_a_starter_are_written_and_its_commands_load_them(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", kind, "mine/first"]) == 0
    said = capsys.readouterr().out
    folder = Path("mine/first")
    assert sorted(path.name for path in folder.iterdir()) == sorted(STARTERS[kind].files)
    assert "cd mine/first" in said and all(command in said for command in STARTERS[kind].commands)
    config = STARTERS[kind].files[0]
    _, section, *_ = next(command for command in STARTERS[kind].commands if config in command).split()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        loaded = load_config(config, root=TRAINING_RUNS.get(section, EvalRunConfig))
        assert loaded.warnings == ()
        assert (kind not in RECORDED) == hasattr(loaded.config, "env")


def test_a_model_takes_the_place_of_the_named_one() -> None:
    assert main(["init", "dpo", "a", "--model", "org/other-1B"]) == main(["init", "eval", "b", "--model", "my: model"]) == 0
    assert load_config("a/dpo.yaml", root=TRAINING_RUNS["dpo"], check=False).config.policy.model_name == "org/other-1B"
    assert load_config("b/eval.yaml", root=EvalRunConfig, check=False).config.generation.model_name == "my: model"


def test_a_file_that_is_there_is_named_and_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    Path("reward.py").write_text("mine")
    assert main(["init", "grpo"]) == 2
    assert "error: reward.py is there already, with other contents" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["reward.py"] and Path("reward.py").read_text() == "mine"


def test_the_starters_of_the_examples_are_those_of_the_package_and_are_shipped() -> None:
    assert (ROOT / "examples" / "starters").resolve() == FOLDER.resolve()
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["strop"]
    named = {name for starter in STARTERS.values() for name in starter.files}
    assert named == {path.name for path in FOLDER.iterdir() if path.is_file()}
    assert all(any(fnmatch(f"extensions/starters/files/{name}", pattern) for pattern in patterns) for name in named)
