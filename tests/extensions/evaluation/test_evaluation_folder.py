"""Finished tasks are kept, and read again unless the settings changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop import cli
from strop.extensions.evaluation.evaluation_folder import TaskLog
from strop.runs.evaluation_job import EvaluationIdentity
from support.saved_runs import CONFIG, save_run

SETS: dict[str, dict[str, Any]] = {"AIME2025": {"samples": 4, "temperature": 0.6}, "math500": {"samples": 1, "temperature": 0.6}}
IDENTITY = EvaluationIdentity({"model": "m", "seeds": [1, 2]}, SETS)


def write(folder: Path, identity: EvaluationIdentity = IDENTITY) -> TaskLog:
    log = TaskLog(folder, identity)
    log.of_set("AIME2025").add(3, {"task": "3", "samples": [{"accuracy": 0.1, "completion": "\N{LINE SEPARATOR}\n"}]})
    log.of_set("math500").add(0, {"task": "0", "samples": []})
    log.close(complete=False)
    return log


def test_finished_tasks_are_read_again(tmp_path: Path) -> None:
    written = write(tmp_path)
    again = TaskLog(tmp_path, IDENTITY)
    assert not again.changes and again.count == 2
    assert all(again.tasks_of(name) == written.tasks_of(name) for name in SETS)


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_line_that_was_cut_off_is_sampled_again(tmp_path: Path, cut: int) -> None:
    write(tmp_path)
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    log = TaskLog(tmp_path, IDENTITY)
    assert log.count == (2 if cut == 1 else 1)
    log.of_set("math500").add(0, {"task": "0", "samples": []})
    log.close(complete=False)
    assert TaskLog(tmp_path, IDENTITY).count == 2


def test_other_settings_start_anew_and_say_which(tmp_path: Path) -> None:
    write(tmp_path)
    log = TaskLog(tmp_path, EvaluationIdentity({**IDENTITY.settings, "model": "n"}, SETS))
    assert log.changes == ['model: "m" -> "n"'] and log.count == 0
    assert (tmp_path / "tasks.previous.jsonl").is_file()


def test_of_files_those_are_named_that_changed(tmp_path: Path) -> None:
    files = [[f"tokenizer-{number}.json", 100, number] for number in range(9)]
    for time in (1, 2):
        settings = {**IDENTITY.settings, "model files": [*files, ["model.safetensors", 100, time]]}
        log = TaskLog(tmp_path, EvaluationIdentity(settings, SETS))
        log.of_set("math500").add(0, {"task": "0", "samples": []})
        log.close(complete=False)
    assert log.changes == ['model files: [["model.safetensors", 100, 1]] -> [["model.safetensors", 100, 2]]']


def test_other_settings_of_one_set_leave_the_others(tmp_path: Path) -> None:
    write(tmp_path)
    sets = {**SETS, "AIME2025": {**SETS["AIME2025"], "samples": 8}, "gsm8k": {"samples": 1}}
    log = TaskLog(tmp_path, EvaluationIdentity(IDENTITY.settings, sets))
    assert log.changes == ["AIME2025: samples: 4 -> 8"]
    assert [len(log.tasks_of(name)) for name in sets] == [0, 1, 0]


def test_nothing_is_left_of_an_evaluation_without_tasks_nor_of_one_that_is_complete(tmp_path: Path) -> None:
    TaskLog(tmp_path, IDENTITY).close(complete=False)
    assert not list(tmp_path.iterdir())
    write(tmp_path)
    TaskLog(tmp_path, IDENTITY).close(complete=True)
    assert not list(tmp_path.iterdir())


ROWS = [{"problem": f"What is {n} + {n + 1}?", "answer": str(2 * n + 1)} for n in range(8)]


def write_questions(path: Path, rows: list[dict[str, str]]) -> None:
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
    write_questions(tmp_path / "train.jsonl", [{"problem": "Name a colour.", "answer": "red"}, planted])
    write_questions(tmp_path / "held_out.jsonl", ROWS)
    assert cli.main(["eval", logs]) == 0
    out = capsys.readouterr().out
    assert "warning: 1 of the 8 questions are in the training data of this run, word for word: " in out
    assert "held_out.jsonl:3 is " in out and "train.jsonl:1. " in out
    write_questions(tmp_path / "train.jsonl", [{"problem": "Name a colour.", "answer": "red"}])
    assert cli.main(["eval", logs]) == 0
    assert "in the training data" not in capsys.readouterr().out
    (tmp_path / "train.jsonl").unlink()  # nothing is known of data that are gone
    assert cli.main(["eval", logs, "data.dataset_name=held_out.jsonl"]) == 0
    assert "in the training data" not in capsys.readouterr().out
