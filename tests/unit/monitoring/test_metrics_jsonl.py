"""metrics.jsonl: one valid object a step, whatever is killed when."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strop.monitoring.trackers.base import CompositeTracker
from strop.monitoring.trackers.jsonl import JsonlTracker, MalformedMetrics, read_metrics
from support.full_disk import FullDisk


def steps_in(folder: Path) -> list[int]:
    return [step for step, _ in read_metrics(folder / "metrics.jsonl")]


def write(folder: Path, steps: range) -> JsonlTracker:
    tracker = JsonlTracker(folder)
    for step in steps:
        tracker.log(step, {"train/reward": step / 7})
    return tracker


def test_every_line_is_an_object_with_a_step_and_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "new" / "folder")
    tracker.log(1, {"train/reward": 0.1, "train/groups_dropped": 2})
    assert [json.loads(line) for line in tracker.path.read_text().splitlines()] == [
        {"step": 1, "train/reward": 0.1, "train/groups_dropped": 2.0}
    ]


def test_numbers_come_back_to_the_last_bit(tmp_path: Path) -> None:
    values = {"a": 0.1 + 0.2, "b": math.pi * 1e-30, "c": -1e300, "d": 5e-324}
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, values)
    assert read_metrics(tracker.path) == [(1, values)]


def test_values_that_are_not_finite_are_valid_json_and_come_back(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads(tracker.path.read_text(), parse_constant=refuse)
    assert line["a"] is None and line["nonfinite"] == {"a": "nan", "b": "inf", "c": "-inf"}
    values = read_metrics(tracker.path)[0][1]
    assert math.isnan(values["a"])
    assert (values["b"], values["c"], values["d"]) == (math.inf, -math.inf, 1.0)


def test_a_step_logged_twice_is_one_object_with_the_keys_of_both(tmp_path: Path) -> None:
    tracker = write(tmp_path, range(3))
    tracker.log(2, {"validation/accuracy": 0.5, "train/reward": math.nan})
    tracker.log(2, {"train/reward": 1.0})
    tracker.log(3, {"train/reward": 0.0})
    assert steps_in(tmp_path) == [0, 1, 2, 3]
    assert read_metrics(tracker.path)[2][1] == {"train/reward": 1.0, "validation/accuracy": 0.5}


def test_an_earlier_step_is_refused_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    write(tmp_path, range(5)).close()
    with pytest.raises(ValueError, match=r"resume\(1\)"):
        JsonlTracker(tmp_path).log(2, {})
    assert steps_in(tmp_path) == [0, 1, 2, 3, 4]


def test_resume_drops_the_steps_that_will_run_again(tmp_path: Path) -> None:
    write(tmp_path, range(10)).close()
    tracker = JsonlTracker(tmp_path)
    tracker.resume(6)
    assert steps_in(tmp_path) == [0, 1, 2, 3, 4, 5, 6]
    tracker.log(7, {})
    assert steps_in(tmp_path) == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("cut", [1, 2, 10, 25])
def test_a_last_line_cut_by_a_kill_is_healed(tmp_path: Path, cut: int) -> None:
    write(tmp_path, range(4)).close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    whole = 4 if cut == 1 else 3  # only the newline is missing: the step is there
    assert steps_in(tmp_path) == list(range(whole))  # also for a reader, before anything is healed
    tracker = JsonlTracker(tmp_path)
    tracker.log(4, {})
    assert steps_in(tmp_path) == [*range(whole), 4]
    assert path.read_text().count("\n") == whole + 1


def test_a_malformed_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    write(tmp_path, range(3)).close()
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "hello", lines[2], ""]))
    with pytest.raises(MalformedMetrics, match="line 2"):
        JsonlTracker(tmp_path)


def test_a_writer_killed_at_any_moment_leaves_a_readable_record(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from strop.monitoring.trackers.jsonl import JsonlTracker\n"
        "tracker = JsonlTracker(pathlib.Path(sys.argv[1]))\n"
        "for step in range(10**6):\n"
        "    tracker.log(step, {f'm/{i}': i / 3 for i in range(40)}); tracker.log(step, {'late': 1.0}); print(step, flush=True)\n"
    )
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        writer = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        said = 0
        while said < 5 * (attempt + 1):
            said = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
        rest, _ = writer.communicate()
        said = max([said, *(int(line) for line in rest.split())])
        JsonlTracker(folder)
        steps = read_metrics(folder / "metrics.jsonl")
        assert [step for step, _ in steps] == list(range(len(steps))) and len(steps) > said
        assert all(len(values) == 41 for _, values in steps[: said + 1])


def test_steps_that_a_full_disk_refuses_are_written_in_order_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(tmp_path, monkeypatch)
    tracker = CompositeTracker([JsonlTracker(tmp_path)])
    tracker.log(1, {"a": 1.0})
    disk.full = True
    tracker.log(2, {"a": 2.0})
    tracker.log(3, {"a": 3.0})
    tracker.log(3, {"b": 3.5})
    assert read_metrics(tmp_path / "metrics.jsonl") == [(1, {"a": 1.0})], "half of a line is taken back"
    disk.full = False
    tracker.log(4, {"a": 4.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        (1, {"a": 1.0}),
        (2, {"a": 2.0}),
        (3, {"a": 3.0, "b": 3.5}),
        (4, {"a": 4.0}),
    ]
    assert caplog.text.count("cannot be written: the disk is full") == 1 and "3 steps that had to wait" in caplog.text


def test_a_metrics_file_that_was_deleted_beside_a_checkpoint_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"a": 1.0})
    tracker.resume(2)  # killed between saving step 2 and logging it
    assert not caplog.records
    tracker.resume(8)
    assert "has no steps 2 to 7, and the run continues after step 8" in caplog.text


@pytest.mark.parametrize("gone", ["the file", "the folder"])
@pytest.mark.parametrize("next_step", [3, 4])
def test_a_metrics_file_that_is_deleted_while_the_run_writes_it_is_said_and_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gone: str, next_step: int
) -> None:
    tracker = write(tmp_path / "logs", range(1, 4))
    shutil.rmtree(tmp_path / "logs") if gone == "the folder" else (tmp_path / "logs" / "metrics.jsonl").unlink()
    for step in range(next_step, 6):
        tracker.log(step, {"train/reward": 0.5})
    tracker.close()
    assert steps_in(tmp_path / "logs") == list(range(next_step, 6))
    assert caplog.text.count("was deleted while the run writes it") == 1
