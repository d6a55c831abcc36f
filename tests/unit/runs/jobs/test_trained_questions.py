"""An evaluation says that the run was trained on its questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop import cli
from support.saved_runs import CONFIG, save_run

ROWS = [{"problem": f"What is {n} + {n + 1}?", "answer": str(2 * n + 1)} for n in range(8)]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder: Path, model: Path, **train: str | int) -> str:
    entries = "train: {{dataset_name: train.jsonl" + "".join(f", {key}: {value}" for key, value in train.items()) + "}}"
    config = CONFIG.replace("train: {{env_name: arithmetic}}", entries).replace("size: 8", "dataset_name: held_out.jsonl")
    config = config.replace("env_name: arithmetic", "env_name: math").replace(
        "env: {{arithmetic:", "env: {{math: {{}}, arithmetic:"
    )
    return str(save_run(folder, model, config=config, steps=(2,)).relative_to(folder))


def test_a_run_that_trained_on_its_evaluation_is_warned_of(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    logs = make_run(tmp_path, tiny_model_folder)
    planted = {"problem": "what is $3+4$", "answer": "7"}
    write(tmp_path / "train.jsonl", [{"problem": "Name a colour.", "answer": "red"}, planted])
    write(tmp_path / "held_out.jsonl", ROWS)
    assert cli.main(["eval", logs]) == 0
    out = capsys.readouterr().out
    assert "warning: 1 of the 8 questions are in the training data of this run, word for word: " in out
    assert "held_out.jsonl:3 is " in out and "train.jsonl:1. " in out
    write(tmp_path / "train.jsonl", [{"problem": "Name a colour.", "answer": "red"}])
    assert cli.main(["eval", logs]) == 0
    assert "in the training data" not in capsys.readouterr().out
    (tmp_path / "train.jsonl").unlink()  # nothing is known of data that are gone
    assert cli.main(["eval", logs, "data.dataset_name=held_out.jsonl"]) == 0
    assert "in the training data" not in capsys.readouterr().out
