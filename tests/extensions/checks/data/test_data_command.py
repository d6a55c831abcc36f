"""``strop data check``: its table, its JSON and its exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.cli import main


@pytest.fixture
def config(tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def write(*more: dict[str, str]) -> str:
        rows = [*({"prompt": f"What is {n} times 3?", "completion": f"It is {3 * n}."} for n in range(30)), *more]
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("run.yaml").write_text(
            f"policy: {{model_name: {tiny_model_folder}, max_total_sequence_length: 200}}\n"
            "data: {train: {dataset_name: rows.jsonl, split_validation_size: 4}}\nsft: {max_num_steps: 2}\n"
        )
        return "run.yaml"

    return write


def test_sound_data_has_a_table_and_exit_code_0(config, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", config(), "--against", "none"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"data.train: rows.jsonl +26 +26 +\d+ / \d+ / \d+ +\d+ / \d+ / \d+ +- +-\n", printed)
    assert "data.train (held out): rows.jsonl" in printed and printed.endswith("no findings\n")


def test_what_is_lost_is_exit_code_1_and_stands_in_the_json(config, capsys: pytest.CaptureFixture[str]) -> None:
    file = config({"prompt": "Count.", "completion": "one two " * 200})
    assert main(["data", "check", file, "data.train.split_validation_size=0", "--against", "none", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (finding,) = report["entries"][0]["findings"]
    assert (report["status"], finding["severity"], finding["check"], finding["count"]) == ("error", "error", "too_long", 1)
    assert finding["examples"][0]["location"] == "rows.jsonl:31" and finding["fix"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run.yaml", "data.train.dataset_nme=x"], "Did you mean data.train.dataset_name?"),
        (["run.yaml", "--against", "gone.jsonl"], "--against gone.jsonl: there is no data file 'gone.jsonl'"),
        (["gone.yaml"], "gone.yaml"),
    ],
)
def test_a_check_that_cannot_be_made_is_exit_code_2(
    config, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    config()
    assert main(["data", "check", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_data_that_cannot_be_opened_is_exit_code_2(config, capsys: pytest.CaptureFixture[str]) -> None:
    file = config()
    Path("broken.parquet").write_text("no parquet")
    assert main(["data", "check", file, "data.validation={dataset_name: broken.parquet}", "--against", "none"]) == 2
    assert "UNCHECKED data.validation: broken.parquet cannot be read as Parquet" in capsys.readouterr().out
