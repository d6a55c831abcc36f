"""``strop report``: one HTML file of a run, in which nothing that a model wrote is markup."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from strop import cli
from strop.cli.log_folder import find_log_folder
from strop.config.source import yaml_text
from strop.monitoring.pages.curve_drawing import find_range, make_ticks, thin
from strop.monitoring.run_starts import describe_hardware, find_versions, read_run_starts
from strop.monitoring.trackers.jsonl import read_metrics
from strop.monitoring.watchdog.status import read_status, write_status
from strop.runs.contents.run_contents import CONTENTS_FILE, Content, write_contents
from strop.runs.run_report.config_difference import list_changed_settings
from strop.runs.run_report.report_facts import list_repeat_commands, read_report_facts
from strop.runs.run_report.run_incidents import list_incidents
from strop.runs.run_report.validation_results import read_validations
from strop.safety.printable import make_printable
from strop.statistics.intervals import confidence_interval
from support.html_pages import ParsedPage, check_page
from support.reported_runs import HOSTILE, STEPS, write_run


def make_page(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> str:
    code = cli.main(["report", str(run), *arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return Path(captured.out.strip()).read_text(encoding="utf-8")


def text_of(page: ParsedPage) -> str:
    return "\n".join(text for tag, texts in page.texts.items() for text in texts if tag not in ("script", "style"))


def test_the_lines_that_repeat_a_run_can_be_installed_and_name_what_the_page_does_not_hold(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine")
    facts = read_report_facts(run)
    versions = {"python": "3.12.1", "strop": "0.26", "torch": "2.13.0+cpu", "numpy": "2.5.0"}
    facts = replace(facts, starts=[replace(facts.starts[-1], versions=versions)])
    contents = {
        "env.mine.reward": Content("code", "reward.py:correct", "ab12"),
        "data.train.dataset_name": Content("data", "tickets.jsonl", "cd34", "40 rows"),
        "policy.model_name": Content("weights", "models/tiny", "ef56"),
    }
    (run / CONTENTS_FILE).write_text(write_contents(contents))
    lines = list_repeat_commands(facts)
    assert "pip install -e . torch==2.13.0 numpy==2.5.0" in lines and any("torch 2.13.0+cpu" in line for line in lines)
    assert "#   code reward.py:correct: ab12" in lines and "#   data tickets.jsonl: 40 rows, cd34" in lines
    assert not any("models/tiny" in line for line in lines), "the configuration has its name"


def test_a_report_is_one_page_with_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "mine")
    text = make_page(capsys, run)
    assert (run / "report.html").read_text() == text
    page = check_page(text)
    said = text_of(page)
    assert [attributes["id"] for tag, attributes in page.elements if tag == "section"] == [
        "summary", "curves", "validation", "samples", "mismatch", "profiles", "incidents", "configuration", "environment", "repeat",
    ]  # fmt: skip
    assert "finished after its last step" in said and "B is better: +" in said
    assert (
        "Of 20 different tasks that were sampled both at step 0 and at step 30 of validation, 10 became better, 1 worse, and 9 did not "
        "change." in said
    )
    assert "grpo.max_num_steps" in said and "policy.generation.max_new_tokens" in said and "policy.precision" in said
    assert "torch 2.0 -> 2.20" in said and "3 groups dropped, because a rollout failed" in said and "steps 13 to 14, 19" in said
    assert "strop grpo --config config.yaml " in said and "pip install -e . torch==2.20" in said and "an answer" in said


def test_samples_that_cannot_be_read_are_passed_over_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "mine")
    for step in (0, 30):
        file = run / "validation" / f"step_{step:06d}.json"
        file.write_bytes(file.read_bytes()[:100])
    said = text_of(check_page(make_page(capsys, run)))
    assert "Step 0 of validation was passed over: DamagedRollouts: " in said and "Step 30 of validation was passed over" in said
    assert "sampled both at step 1 and at step 30 of training" in said
    (run / "rollouts" / "step_000030.parquet").write_bytes(b"")
    said = text_of(check_page(make_page(capsys, run)))
    assert "Step 30 of training was passed over: DamagedRollouts: " in said and "No task was sampled at two steps" in said


def test_recorded_steps_are_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "mine", steps=2)
    assert "No step was recorded (logger.profile.steps)." in text_of(check_page(make_page(capsys, run)))
    (run / "profiles").mkdir()
    (run / "profiles" / "step_000003.json.gz").write_bytes(b"")
    assert "open in Perfetto or Chromium's DevTools: step_000003.json.gz" in text_of(check_page(make_page(capsys, run)))


def test_a_report_may_go_to_a_folder_that_is_not_there_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "mine", steps=2)
    make_page(capsys, run, "--output", str(tmp_path / "new" / "for_you.html"))
    assert (tmp_path / "new" / "for_you.html").is_file() and not (run / "report.html").exists()


def test_nothing_that_a_model_a_task_or_a_setting_says_is_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = make_page(capsys, write_run(tmp_path / "mine", text=HOSTILE))
    page = check_page(text)
    plain = check_page(make_page(capsys, write_run(tmp_path / "plain")))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]  # the same elements, whatever is said
    assert make_printable(HOSTILE) in text_of(page)
    assert "alert" not in page.texts["script"][0] and text.count("<script>") == 1


def test_a_run_of_an_older_version_and_one_without_validations_are_reported_with_what_they_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "mine", validations=False, steps=3)
    (run / "starts.jsonl").unlink()
    (run / "status.json").write_text("{}")
    (run / "rollouts" / "step_000003.parquet").write_bytes(b"cut")
    said = text_of(check_page(make_page(capsys, run)))
    assert (
        "has not validated" in said
        and "Fingerprints of the data are not recorded" in said
        and "No task was sampled at two steps" in said
    )
    for name in ("config.yaml", "config_history.jsonl", "status.json"):
        (run / name).unlink()
    assert "settings differ" not in text_of(check_page(make_page(capsys, run)))


def test_a_folder_without_a_run_and_one_without_steps_get_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "has not finished its first step" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["report", str(tmp_path), "--outptu", "x"])
    assert "did you mean --output?" in capsys.readouterr().err


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


def test_a_run_that_was_killed_is_said_to_have_died(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "mine", steps=2)
    (run / "config_history.jsonl").unlink(missing_ok=True)
    status = read_status(run)
    assert status is not None
    write_status(run, replace(status, state="running", host=socket.gethostname(), pid=2**30))
    page = make_page(capsys, run)
    assert "2 steps; died before its end." in page and "died without a final status" in page
    (run / "metrics.jsonl").unlink()
    for command in ("report", "plot"):
        assert cli.main([command, str(run)]) == 2
        assert "has no metrics yet: the run has not finished its first step; " in (said := capsys.readouterr().err)
        assert f"see strop doctor {run}" in said


def test_a_sample_that_became_better_says_so_in_colour_and_one_that_did_not_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = make_page(capsys, write_run(tmp_path / "mine"))
    assert '<h4 class="good">' in page and page.count("<h4>") >= page.count('<h4 class="good">')


def test_intervals_of_validations_are_those_of_the_statistics_and_equal_the_tasks(tmp_path: Path) -> None:
    results = read_validations(write_run(tmp_path / "mine"))
    assert results is not None and results.steps == (0, STEPS) and results.is_share
    first, last = results.points
    assert (first.mean, last.mean, first.tasks) == (0.2, 0.65, 20)
    assert last.interval == confidence_interval([0.0] + [1.0] * 13 + [0.0] * 6, bounds=(0.0, 1.0))
    assert results.comparison is not None and results.comparison.total.difference == pytest.approx(0.45)


def test_settings_that_differ_are_those_that_a_file_changes_and_no_others() -> None:
    from strop.config import GrpoRunConfig, dump_config, load_config

    overrides = [
        "policy.model_name=m",
        "grpo.max_num_steps=7",
        "data.train.env_name=arithmetic",
        "data.train.weight=2.0",
        "env.arithmetic.type=arithmetic",
    ]
    config = load_config(None, overrides, root=GrpoRunConfig, check=False).config
    changed = list_changed_settings(yaml_text.parse_value(dump_config(config)))
    assert changed is not None
    keys = {each.key: (each.value, each.default) for each in changed}
    assert keys["grpo.max_num_steps"][0] == 7 and not {"policy.precision", "grpo.seed"} & set(keys)
    assert list_changed_settings({"nothing": 1}) is None


def test_incidents_name_restarts_changes_warnings_counts_and_health(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine")
    found = list_incidents(run, read_metrics(run / "metrics.jsonl"), read_status(run), read_run_starts(run))
    assert [each.kind for each in found] == ["restart", "settings", "warning", "watchdog", "count", "errors", "health"]
    assert found[0].text == "continued after step 20; torch 2.0 -> 2.20" and "grpo.seed: 3 -> 4" in found[1].text


def test_lines_of_starts_that_were_cut_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", steps=2)
    with (run / "starts.jsonl").open("a") as file:
        file.write(json.dumps({"after_step": 5, "later": "unknown"}) + '\n{"after_st')
    assert [start.after_step for start in read_run_starts(run)] == [0, 20, 5]
    assert read_run_starts(tmp_path) == []


def test_packages_and_hardware_are_found() -> None:
    assert {"python", "strop", "torch"} <= set(find_versions()) and {"processor", "cores"} <= set(describe_hardware())


def test_a_thinned_curve_keeps_its_spikes_and_its_order() -> None:
    points = [(float(x), 100.0 if x == 777 else float(x % 7)) for x in range(5000)]
    kept = thin(points)
    assert len(kept) <= 400 and (777.0, 100.0) in kept and [x for x, _ in kept] == sorted(x for x, _ in kept)


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-3e-9, 4e-9), (1e6, 1e6 + 1), (-5.0, 1234.5)], ids=["share", "tiny", "large", "wide"]
)
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    ticks = make_ticks(low, high)
    assert 2 <= len(ticks) <= 5 and all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)


def test_an_axis_has_a_width_where_all_values_are_equal() -> None:
    low, high = find_range([0.5, 0.5])
    assert low < 0.5 < high
    assert find_range([0.0, 0.0], span=0.1)[0] == 0.0 and find_range([2.0], share=True) == (0.0, 1.0)


def test_reading_a_run_for_a_report_needs_no_torch(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", steps=2)
    code = f"import sys; from strop import cli; assert cli.main(['report', {str(run)!r}]) == 0; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_facts_of_a_run_that_goes_on_can_be_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", steps=4)
    (run / "config_history.jsonl").unlink()
    facts = read_report_facts(run)
    assert facts.ended == "finished" and facts.section == "grpo" and facts.command.startswith("strop grpo")
