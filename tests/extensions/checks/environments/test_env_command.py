"""``strop env check``: its table, its JSON and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.cli import main
from strop.extensions.checks.task_checks import CHECKS

FAST = ("--tasks", "6", "--skip", "tasks_same")


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    (tmp_path / "rewards.py").write_text(
        "def inside(task, rollout) -> bool:\n    return task.answer in rollout.text\n\n"
        "def right(task, rollout) -> bool:\n    return rollout.text.strip() == task.answer\n"
    )
    rows = [{"problem": f"What is {n} times {n + 3}?", "answer": str(n * (n + 3))} for n in range(40, 70)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write(reward: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(
            f"policy: {{model_name: {tmp_path}/no_model}}\n"
            f"data: {{train: {{env_name: mine, dataset_name: {tmp_path}/rows.jsonl, split_validation_size: 6}}}}\n"
            f"env: {{mine: {{reward: '{tmp_path}/rewards.py:{reward}'}}}}\ngrpo: {{max_num_steps: 2}}\n"
        )
        return str(path)

    return write


def test_a_sound_environment_has_a_table_and_exit_code_0(config, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", config("right"), "--tasks", "6"]) == 0
    printed = capsys.readouterr().out
    assert "mine (FunctionEnvironment): 24 tasks, 6 for validation; 6 looked at" in printed
    assert all(f" {check} " in printed for check in CHECKS)
    assert "reference, plain                1.000     1.000" in printed and printed.endswith("no faults\n")


def test_a_fault_is_exit_code_1_and_stands_in_the_json(config, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", config("inside"), *FAST, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    (mine,) = report["environments"]
    assert {found["check"] for found in mine["findings"] if found["level"] == "fault"} == {"degenerate"}
    flagged = {score["policy"] for score in mine["scores"] if score["flagged"]}
    assert flagged == {"the answer among wrong ones"}
    assert mine["not_checked"] == {"tasks_same": "skipped"}


def test_overrides_bounds_and_skipped_checks_count(config, capsys: pytest.CaptureFixture[str]) -> None:
    file = config("inside")
    assert main(["env", "check", file, *FAST, "--bound", "1.5"]) == 0
    assert main(["env", "check", file, *FAST, "--skip", "degenerate"]) == 0
    right = f"env.mine.reward={Path(file).parent}/rewards.py:right"
    assert main(["env", "check", file, right, *FAST]) == 0
    assert capsys.readouterr().out.count("no faults") == 3


def test_mistakes_are_exit_code_2_and_say_what_there_is(config, capsys: pytest.CaptureFixture[str]) -> None:
    file, sft = config("right"), str(Path(__file__).parents[4] / "examples" / "configs" / "sft.yaml")
    for arguments, said in (
        ([file, "--env", "other"], "--env: no training data is of the environment 'other'; there are: mine"),
        ([file, "--skip", "spilts"], "--skip: there is no check 'spilts'; did you mean 'splits'?"),
        ([file, "env.mine.reward=nothing.py:right"], "importing 'nothing.py' failed"),
        ([file, "grpo.sed=3"], "grpo.sed"),
        ([f"{file}.not"], "run.yaml.not"),
        ([sft], "is a run on recorded data (strop sft), which has no environments"),
    ):
        assert main(["env", "check", *arguments]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["env", "check", file, "--tasks", "1"])
    assert ended.value.code == 2


def test_a_configuration_of_an_evaluation_is_checked_too(config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config("right")
    file = tmp_path / "eval.yaml"
    file.write_text(
        f"generation: {{model_name: {tmp_path}/no_model}}\ndata: {{env_name: mine, dataset_name: {tmp_path}/rows.jsonl}}\n"
        f"env: {{mine: {{reward: '{tmp_path}/rewards.py:right'}}}}\neval: {{seed: 3}}\n"
    )
    assert main(["env", "check", str(file), *FAST]) == 0
    assert "30 tasks; 6 looked at" in capsys.readouterr().out
