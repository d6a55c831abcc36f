"""``strop report``: the view of a run as one HTML file, in which nothing that a model wrote is markup."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import strop
from strop import cli
from strop.cli.output import find_log_folder
from strop.extensions.view import saved_view
from strop.monitoring.run_starts import describe_hardware, find_versions, read_run_starts
from support.html_pages import check_page
from support.reported_runs import HOSTILE, STEPS, write_run
from support.viewed_runs import write_runs, write_tokenizer


def make_page(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> str:
    code = cli.main(["report", str(run), *arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return Path(captured.out.strip()).read_text(encoding="utf-8")


def saved_in(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="saved">(.*?)</script>', page)
    assert found is not None
    saved: dict[str, Any] = json.loads(found[1])
    return saved


def test_a_report_holds_what_the_page_asks_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "mine")
    page = make_page(capsys, run)
    assert (run / "report.html").read_text() == page
    saved = saved_in(page)
    answers = saved["answers"]
    (described,) = answers["runs"]
    assert described["name"] == "mine" and described["step"] == STEPS and str(tmp_path) not in page
    metrics = answers["runs/run/metrics"]
    assert metrics["steps"] == list(range(1, STEPS + 1)) and metrics["series"]["train/reward"][-1] == 1.0
    assert set(metrics["names"]) == set(metrics["series"])
    assert [row["step"] for row in answers["runs/run/rollouts"]["rows"]] == [1, STEPS]
    assert answers[f"runs/run/rollouts/{STEPS}/0/0"]["advantage"] == 1.0 and f"runs/run/groups/{STEPS}/0" in answers
    assert [each["step"] for each in answers["runs/run/tasks/sum:0"]] == [1, STEPS]
    assert answers["runs/run/tasks"]["rows"] == [
        {"task": "sum:0", "question": "an answer", "rollouts": 2, "reward": 0.0, "steps": 2, "last_step": STEPS}
    ]
    assert saved["validations"] == [0, STEPS] and len(answers["runs/run/validation/0"]["rows"]) == 20
    assert answers[f"runs/run/rollouts/{STEPS}/1/0?validation"]["reward"] == 1.0
    status = answers["runs/run/status"]
    assert [start["after_step"] for start in status["starts"]] == [0, 20]
    health = answers["runs/run/health"]
    assert health["level"] == "ok" and [(each["name"], each["held"]) for each in health["findings"]] == [
        ("rewards_are_equal", [[5, 5]])
    ]
    assert status["starts"][0]["facts"]["processor"] == "a CPU" and "max_num_steps: 4" in answers["runs/run/config"]["text"]


@pytest.mark.exhaustive
def test_images_are_in_the_file_as_far_as_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_runs(tmp_path, write_tokenizer(tmp_path))
    images = saved_in(make_page(capsys, tmp_path / "quickstart"))["images"]
    assert images and all(each.startswith("data:image/png;base64,iVBOR") for each in images.values())
    monkeypatch.setattr(saved_view, "LARGEST_IMAGES", 100)
    assert saved_in(make_page(capsys, tmp_path / "quickstart"))["images"] == {}


def test_a_long_curve_keeps_the_range_of_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "mine", steps=2, validations=False)
    lines = [json.dumps({"step": step, "train/reward": 100.0 if step == 777 else step % 7}) for step in range(1, 5001)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    metrics = saved_in(make_page(capsys, run))["answers"]["runs/run/metrics"]
    assert len(metrics["steps"]) == 400 and max(metrics["high"]["train/reward"]) == 100.0


def test_what_cannot_be_read_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "mine", model=str(write_tokenizer(tmp_path)))
    (run / "validation" / "step_000000.json").write_bytes(b"{")
    (run / "rollouts" / f"step_{STEPS:06d}.parquet").write_bytes(b"")
    for name in ("starts.jsonl", "config_history.jsonl"):
        (run / name).unlink()
    answers = saved_in(make_page(capsys, run))["answers"]
    assert "the validation of step 0" in answers["runs/run/validation/0"]["note"]
    rollouts = answers["runs/run/rollouts"]
    assert [row["step"] for row in rollouts["rows"]] == [1] and len(rollouts["unreadable"]) == 1
    assert answers["runs/run/status"]["starts"] == []
    (run / "status.json").write_text("{}")
    assert cli.main(["report", str(run)]) == 2 and "status.json cannot be read" in capsys.readouterr().err


def test_nothing_that_a_model_a_task_or_a_setting_says_is_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = check_page(make_page(capsys, write_run(tmp_path / "mine", text=HOSTILE)))
    plain = check_page(make_page(capsys, write_run(tmp_path / "plain")))
    assert page.elements == plain.elements  # whatever is said, these are the elements, with the same policy


def test_a_folder_without_steps_gets_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no" in capsys.readouterr().err
    run = write_run(tmp_path / "mine", steps=1, validations=False)
    (run / "metrics.jsonl").unlink()
    for command in ("report", "plot"):
        assert cli.main([command, str(run)]) == 2
        said = capsys.readouterr().err
        assert "has no metrics yet: the run has not finished its first step; " in said and f"see strop doctor {run}" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["logs/minee"], "there is no logs/minee; name a run's log folder (logger.log_dir); did you mean logs/mine?"),
        (["logs/mine", "logs/other"], "a report is of one run, found logs/other too: strop compare A B compares two"),
        (["logs/mine", "--output", "logs"], "logs cannot be written: it is a folder; name the file to write"),
        (["logs/mine", "--outptu", "x"], "did you mean --output?"),
    ],
    ids=["typo in the folder", "two runs", "output is a folder", "typo in an option"],
)
def test_a_command_that_cannot_work_says_what_to_write_instead(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "logs" / "mine", steps=1, validations=False)
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(["report", *arguments])
    except SystemExit as exit:  # as argparse ends
        code = exit.code
    assert code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / ".logs.tmp").exists()


def test_a_log_folder_is_the_run_wherever_its_configuration_says_that_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that was copied, or that has no step yet, is not taken for the folder that its configuration names."""
    other = write_run(tmp_path / "other", steps=1, validations=False)
    copied = write_run(tmp_path / "copied", steps=1, validations=False)
    (copied / "config.yaml").write_text(f"logger: {{log_dir: {other}}}\n")
    assert find_log_folder(copied) == copied
    (copied / "metrics.jsonl").unlink()
    assert find_log_folder(copied) == copied and cli.main(["report", str(copied)]) == 2
    assert "copied has no metrics yet" in capsys.readouterr().err
    assert find_log_folder(copied / "config.yaml") == other


def test_lines_of_starts_that_were_cut_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", steps=2)
    with (run / "starts.jsonl").open("a") as file:
        file.write(json.dumps({"after_step": 5, "later": "unknown"}) + '\n{"after_st')
    assert [start.after_step for start in read_run_starts(run)] == [0, 20, 5]
    assert read_run_starts(tmp_path) == []
    assert {"python", "strop", "torch"} <= set(find_versions()) and {"processor", "cores"} <= set(describe_hardware())


def test_a_report_is_written_without_torch_and_without_a_server(tmp_path: Path) -> None:
    run, target = write_run(tmp_path / "mine", steps=2), tmp_path / "new" / "for_you.html"
    code = f"""import sys; from strop import cli
assert cli.main(['report', {str(run)!r}, '--output', {str(target)!r}]) == 0
assert not {{'torch', 'aiohttp'}} & set(sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert target.is_file() and not (run / "report.html").exists()


# --- ``Run.report``, from a program and from a notebook -----------------------------------------------------------------------


def test_a_report_is_written_from_python(tmp_path: Path) -> None:
    run = strop.Run(write_run(tmp_path / "mine"))
    assert run.report(tmp_path / "for_you.html").read_text().startswith("<!DOCTYPE html>")
    assert run.report() == run.folder / "report.html"


@pytest.mark.exhaustive
def test_a_real_notebook_shows_a_run_its_tables_and_its_figures(tmp_path: Path) -> None:
    """Executed by Jupyter's own client, in a kernel of its own."""
    import nbformat
    from nbclient import NotebookClient

    write_run(tmp_path / "mine")
    cells = [
        "import strop\nrun = strop.Run('mine')\nrun", "run.metrics.tail(3)", "run.plot()", "run.timing.mean()", "run.validations",
        "run.samples.head(2)", "run.rollouts[['step', 'reward']]", "print(run.report('out.html'))",
    ]  # fmt: skip
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell.outputs[-1] for cell in notebook.cells]
    data = [output.get("data", {}) for output in outputs]
    assert "tiny" in data[0]["text/html"]
    assert "<table" in data[1]["text/html"] and "train/reward" in data[1]["text/html"]
    assert data[2]["image/png"] and outputs[2]["output_type"] == "execute_result"
    assert "generation" in data[3]["text/plain"] and all("<table" in each["text/html"] for each in data[4:7])
    assert outputs[7]["text"] == "out.html\n" and (tmp_path / "out.html").is_file()
