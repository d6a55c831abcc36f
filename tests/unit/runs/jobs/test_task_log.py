"""Finished tasks are kept, and read again unless the settings changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.runs.jobs.evaluation_identity import EvaluationIdentity
from strop.runs.jobs.task_log import TaskLog

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
