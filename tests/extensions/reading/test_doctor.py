"""What the doctor says of a log folder."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop import cli
from strop.extensions.reading.doctor import RunNotFound, diagnose, find_run, format_diagnosis
from strop.monitoring.rollout_store.rollout_record import make_records
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.jsonl import JsonlTracker
from strop.monitoring.waits import LogEntry, Status, Wait, process_start_time, read_status, write_status
from strop.storage.folder_lock import FolderLock
from support.rollouts import make_group, make_rollout, sampled_turn

ME = Status(
    state="running",
    pid=os.getpid(),
    host=socket.gethostname(),
    process_started=process_start_time(os.getpid()),
    started=time.time() - 100,
    written=0.0,
    interval=5.0,
    step=3,
    stepped=time.time() - 60,
    doing="generating: 3 of 8 groups",
    loop_silent=0.0,
    waits=(),
    versions={"strop": "0.1.0"},
    command="strop grpo",
    checkpoints=None,
    troubles=(),
    error=None,
    notes=(),
    reports=(),
    stacks=None,
)


def a_run(folder: Path, steps: int = 3, values: dict[str, float] | None = None, **changes: Any) -> Path:
    tracker = JsonlTracker(folder)
    for step in range(1, steps + 1):
        tracker.log(step, {"train/reward": 0.5, "train/token_mult_prob_error": 1.0 + step / 100, **(values or {})})
    tracker.close()
    now = time.time()  # this file may have been imported long before the test runs
    recent = {"started": now - 100, "written": now, "stepped": now - 60}
    write_status(folder, replace(ME, **{**recent, **changes}))
    return folder


def wait(number: int, **changes: Any) -> Wait:
    fields = {"who": f"sample {number}", "on": "environment Sandbox", "detail": "task xyz", "kind": "environment", "limit": 60.0}
    return Wait(**{**fields, "number": number, "seconds": 312.0, "parent": None, "thread": 1, "running": False, **changes})


def test_a_run_without_troubles_is_running(tmp_path: Path) -> None:
    found = diagnose(a_run(tmp_path))
    assert found.verdict == "running" and found.healthy and found.step == 3 and found.advice == ()
    assert found.since_step is not None and 59 < found.since_step < 90
    assert found.mismatch is not None and "1.0300 in step 3" in found.mismatch
    text = format_diagnosis(found)
    assert "generating: 3 of 8 groups" in text and "1:0" in text and "ago" in text


def test_a_wait_over_its_limit_is_a_hung_run_and_says_who_waits_for_whom(tmp_path: Path) -> None:
    loop = wait(0, who="training loop", on="generation", detail="", kind="", limit=None)
    waits = (loop, wait(1, parent=0), wait(2, parent=0, seconds=3.0))
    run = a_run(tmp_path, waits=waits, troubles=("step 4 waits longer than ...",), stacks="logs/stacks_1.txt")
    found = diagnose(run)
    assert found.verdict == "hung" and found.why == "step 4 waits longer than ..."
    assert found.waits == (
        "training loop waits for generation: 312.0 s",
        "   sample 1 waits for environment Sandbox (task xyz): 312.0 of 60 s  OVER ITS LIMIT",
        "   sample 2 waits for environment Sandbox (task xyz): 3.0 of 60 s",
    )
    assert "the environment does not answer" in found.advice[0] and "stacks_1" in found.advice[1]


def test_a_process_that_is_gone_is_a_dead_run_also_when_its_number_was_given_away(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", ""])
    other.wait()
    for changes in ({"pid": other.pid}, {"process_started": ME.process_started - 1}):
        found = diagnose(a_run(tmp_path / str(changes), **changes))
        assert found.verdict == "dead" and "out-of-memory killer" in found.why and not found.healthy
        assert any("start the same command again" in line for line in found.advice)


def test_a_run_elsewhere_is_judged_by_whether_it_still_writes(tmp_path: Path) -> None:
    assert diagnose(a_run(tmp_path / "a", host="elsewhere", pid=1)).verdict == "running"
    write_status(tmp_path / "a", replace(ME, host="elsewhere", written=time.time() - 60))
    found = diagnose(tmp_path / "a")
    assert found.verdict == "hung" and "no sign of life from elsewhere for 1:00" in found.why


@pytest.mark.parametrize(("state", "healthy"), [("finished", True), ("failed", False), ("interrupted", False)])
def test_how_a_run_ended_is_told(tmp_path: Path, state: str, healthy: bool) -> None:
    found = diagnose(a_run(tmp_path, state=state, pid=1, error="ValueError: bad" if state == "failed" else None))
    assert found.verdict == state and found.healthy is healthy
    assert ("ValueError: bad" in format_diagnosis(found)) == (state == "failed")


def test_the_newest_checkpoint_is_named(tmp_path: Path) -> None:
    for name in ("step_9", "step_10", "previous_1", ".tmp_step_11"):
        (tmp_path / "results" / name).mkdir(parents=True)
    found = diagnose(a_run(tmp_path / "logs", checkpoints=str(tmp_path / "results"), state="failed", error="x"))
    assert found.checkpoint == str(tmp_path / "results" / "step_10")
    assert any(f"continues from {found.checkpoint}" in line for line in found.advice)


def test_groups_that_failed_and_warnings_of_mismatch_are_told(tmp_path: Path) -> None:
    notes = (
        LogEntry(time.time(), "warning: mismatch: step 2: sampler and learner differ"),
        LogEntry(time.time(), "checkpoint: x"),
    )
    found = diagnose(a_run(tmp_path, values={"train/groups_dropped_for_errors": 2.0}, notes=notes))
    assert found.dropped == ("6 groups failed in the last 3 steps; last in step 3:",)
    assert found.mismatch is not None and found.mismatch.endswith("step 2: sampler and learner differ")


def test_the_errors_of_dropped_groups_are_read_from_the_stored_rollouts(tmp_path: Path) -> None:
    group = make_group(
        *(replace(make_rollout([1], sampled_turn([5])), error=f"RewardError: sandbox {place % 2}") for place in range(4))
    )
    RolloutStore(tmp_path, "jsonl").write(3, make_records(3, [group], dropped={0: "error"}))
    found = diagnose(a_run(tmp_path, values={"train/groups_dropped_for_errors": 1.0}))
    assert found.dropped[1:] == ("  RewardError: sandbox 0", "  RewardError: sandbox 1")


def test_without_a_status_the_metrics_are_all_there_is(tmp_path: Path) -> None:
    (a_run(tmp_path) / "status.json").unlink()
    found = diagnose(tmp_path)
    assert (found.verdict, found.step, found.healthy) == ("unknown", 3, False)


def test_a_run_is_found_by_its_folder_or_a_file_in_it_and_otherwise_said_where_to_look(tmp_path: Path) -> None:
    run = a_run(tmp_path / "logs" / "mine")
    assert find_run(run) == find_run(run / "metrics.jsonl") == find_run(run / "status.json") == run
    with pytest.raises(RunNotFound, match=r"logger\.log_dir\); there are runs in it: mine"):
        find_run(tmp_path / "logs")
    with pytest.raises(RunNotFound, match="there is no"):
        find_run(tmp_path / "nowhere")


def test_the_command_prints_text_or_json_and_its_exit_code_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "logs")
    assert cli.main(["doctor", str(run)]) == 0
    assert capsys.readouterr().out.startswith("run          ")
    assert cli.main(["doctor", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "running"
    a_run(tmp_path / "failed", state="failed", error="x")
    assert cli.main(["doctor", str(tmp_path / "failed")]) == 1
    assert cli.main(["doctor", str(tmp_path / "nothing")]) == 2
    assert "there is no" in capsys.readouterr().err


def test_metrics_that_are_cut_in_the_middle_of_a_line_are_an_error_with_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path)
    (run / "metrics.jsonl").write_text('{"step": 1, "metrics": {}}\nnot a step\n')
    assert cli.main(["doctor", str(run)]) == 2
    assert re.search(r"metrics\.jsonl.*2", capsys.readouterr().err)


def test_the_doctor_needs_no_torch(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    program = f"import sys; from strop.cli import main; main(['doctor', {str(run)!r}]); print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout
    assert output.splitlines()[-1] == "False"


def test_a_status_with_a_name_that_no_file_can_hold_is_written(tmp_path: Path) -> None:
    write_status(tmp_path, replace(ME, doing="task \udc80"))
    status = read_status(tmp_path)
    assert status is not None and status.doing == "task ?"


def test_a_run_without_a_watchdog_is_known_by_who_holds_its_folder(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert diagnose(tmp_path).verdict == "unknown"
    lock = FolderLock.acquire(tmp_path)
    found = diagnose(tmp_path)
    assert found.verdict == "running" and f"process {os.getpid()} on " in found.why
    lock.release()
    assert diagnose(tmp_path).verdict == "unknown"


def test_a_run_that_holds_the_folder_is_told_before_the_status_of_an_earlier_one(tmp_path: Path) -> None:
    lock = FolderLock.acquire(a_run(tmp_path, pid=os.getppid(), state="finished"))
    found = diagnose(tmp_path)
    assert found.verdict == "running" and found.step == 3 and f"process {os.getpid()} on " in found.why
    lock.release()
    assert diagnose(tmp_path).verdict == "finished"


def test_the_own_lock_of_a_run_that_is_stuck_hides_nothing(tmp_path: Path) -> None:
    lock = FolderLock.acquire(a_run(tmp_path, troubles=("step 4 waits longer than ...",)))
    assert diagnose(tmp_path).verdict == "hung"
    lock.release()
