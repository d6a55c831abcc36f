"""`strop plot A B` puts runs into one picture, and says what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop import cli


def write_run(folder: Path, seed: int, lr: float = 1e-5) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"grpo: {{seed: {seed}}}\npolicy: {{optimizer: {{kwargs: {{lr: {lr}}}}}}}\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/reward": 0.5}\n{"step": 2, "train/reward": 0.6}\n')
    return folder


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The legends of the pictures that were drawn."""
    seen: list[list[str]] = []
    from matplotlib.figure import Figure

    def keep(figure: Figure, path: Path, dpi: int) -> None:
        seen.append([text.get_text() for text in figure.legends[0].texts])

    monkeypatch.setattr(Figure, "savefig", keep)
    monkeypatch.chdir(tmp_path)
    return seen


def test_runs_of_several_seeds_are_lines_named_by_what_differs(
    labels: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(write_run(Path(f"logs/{seed}_{lr}"), seed, lr)) for seed in (1, 2) for lr in (1e-5, 3e-5)]
    assert cli.main(["plot", *runs]) == 0
    assert capsys.readouterr().out == "comparison.png\n" and labels == [["lr=1e-05 (2 seeds)", "lr=3e-05 (2 seeds)"]]
    assert cli.main(["plot", *runs[:2], "--no-group-by-seed", "--output", "x.png", "--metric", "train/reward"]) == 0
    assert capsys.readouterr().out == "x.png\n" and labels[1] == ["lr=1e-05", "lr=3e-05"]


def test_one_run_with_chosen_metrics_goes_into_its_folder(labels: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(Path("logs/a"), 1)
    assert cli.main(["plot", str(run), "--metric", "train/reward"]) == 0
    assert capsys.readouterr().out == "logs/a/curves.png\n" and labels == [["a"]]


def test_a_run_that_is_not_there_is_named_with_near_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "seed_1", 1)
    assert cli.main(["plot", str(run), str(tmp_path / "sed_1")]) == 2
    assert "did you mean 'seed_1'?" in capsys.readouterr().err
    assert cli.main(["plot", str(run), "--metric", "train/rewrd"]) == 2
    assert "error: no run has values of 'train/rewrd'; did you mean 'train/reward'?" in capsys.readouterr().err
