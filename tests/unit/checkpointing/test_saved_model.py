"""Models found by the name that a user gives, and written in Hugging Face's format."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop import Run
from strop.checkpointing.saved_model import SavedModelNotFound, find_saved_model
from support.saved_runs import save_run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    root = tmp_path_factory.mktemp("home")
    save_run(root, tiny_model_folder)
    return root


def test_each_name_of_a_run_finds_its_newest_checkpoint(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    newest = (root / "results/mine/step_4/policy/weights").resolve()
    names = (
        "logs/mine",
        "results/mine",
        "results/mine/step_4",
        "results/mine/step_4/policy",
        "results/mine/step_4/policy/weights",
    )
    for cwd in (root, tmp_path, root / "logs/mine"):
        monkeypatch.chdir(cwd)
        for name in names:
            found = find_saved_model(root / name)
            assert Path(found.weights).resolve() == newest and found.step == 4, (cwd, name)
            assert found.log_folder is not None and found.log_folder.resolve() == (root / "logs/mine").resolve(), (cwd, name)
    monkeypatch.chdir(root / "logs/mine")
    assert Path(find_saved_model(".").weights).resolve() == newest


def test_a_step_the_best_one_and_the_average_are_chosen(root: Path) -> None:
    assert find_saved_model(root / "logs/mine", step=2).step == 2
    assert find_saved_model(root / "results/mine", best=True).step == 2
    assert find_saved_model(root / "logs/mine", ema=True).weights.endswith("step_4/policy/ema")
    assert find_saved_model(root / "results/mine/step_4/policy/weights", ema=True).weights.endswith("policy/ema")


def test_a_model_that_belongs_to_no_run_is_found_by_its_name(root: Path, tiny_model_folder: Path) -> None:
    found = find_saved_model(tiny_model_folder)
    assert (found.weights, found.config_file, found.layout) == (str(tiny_model_folder), None, "whole")
    assert find_saved_model("Qwen/Qwen2.5-0.5B-Instruct").layout == "hub"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("logs/mien", {}, "logs/mien does not exist; did you mean logs/mine?"),
        ("result/mine/step_4", {}, "did you mean results/mine/step_4?"),
        ("logs/elsewhere/entirely", {}, "folders in logs: mine"),
        ("logs/mine", {"step": 3}, "has no checkpoint of step 3; there are: 2, 4"),
        ("logs/mine/config.yaml", {}, "is a file; name the folder it is in"),
        ("results/mine/step_4", {"critic": True}, "only strop ppo trains one"),
        ("results", {}, "holds neither a run (config.yaml), nor checkpoints (step_N), nor a model"),
        ("Qwen/Qwen3-8B", {"best": True}, "Qwen/Qwen3-8B does not exist"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, int], said: str
) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(SavedModelNotFound) as raised:
        find_saved_model(name, **options)  # type: ignore[arg-type]
    assert said in str(raised.value)


def test_a_run_finds_its_checkpoints_from_any_folder(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for cwd in (root, tmp_path, root / "logs"):
        monkeypatch.chdir(cwd)
        run = Run(root / "logs/mine")
        assert [path.name for path in run.checkpoints] == ["step_2", "step_4"]
        assert run.checkpoint is not None and run.checkpoint.resolve() == (root / "results/mine/step_4").resolve()
    monkeypatch.chdir(root)
    assert Run("logs/mine").checkpoint == Path("results/mine/step_4")
