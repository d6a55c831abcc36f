"""The program of a GPU's ten minutes: how it treats jobs that fail, hang or die, its budget, and that what it names is there."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.simulated_device.build import find_obstacle
from support.sweep import sweep

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
MADE_UP = """
import os, subprocess, sys, time
from job import write_row

def fine(target, name): write_row(name, "1", device=0.5)
def broken(target): raise ValueError("first line\\nsecond line")
def slow(target):
    write_row("slow begins", "1")
    print("the last words", flush=True)
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"])
def fatal(target): os._exit(3)
def partial(target):
    sys.stdout.write("an unfinished line")
    sys.stdout.flush()
    write_row("a | b", "failed: 2 (at most 1)", "two\\nlines", ok=False)
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "made_up.py").write_text(MADE_UP)
    monkeypatch.syspath_prepend(str(FOLDER))
    module, job = importlib.import_module("run"), importlib.import_module("job")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *module.FOLDERS]))
    yield module
    for name in ("run", "job", "carry"):
        sys.modules.pop(name, None)
    assert job is not None


@pytest.fixture
def schedule(run: Any, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run made-up stages; return the rows."""

    def go(*stages: Any, seconds: float = 100.0) -> list[dict[str, Any]]:
        results = run.Results(tmp_path / "out", ["here"])
        options = ["--device", "cpu", "--work", str(tmp_path), "--out", str(tmp_path)]
        run.Schedule(stages, options, results, seconds=seconds, slower=1, ahead=2).run()
        return [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]

    return go


@pytest.mark.slow
def test_a_job_that_fails_hangs_or_dies_is_a_row_and_the_others_go_on(
    run: Any, schedule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LEAST_SECONDS", 1.0)
    names = ("broken", "fatal", "partial")
    at_once = run.Stage("at once", tuple(run.Job(name, f"made_up:{name}", 50) for name in names), together=True)
    in_turn = (
        run.Job("missing", "made_up:missing", 50),
        run.Job("slow", "made_up:slow", 4),
        run.Job("fine", "made_up:fine", 50, ("after all",)),
    )
    rows = schedule(at_once, run.Stage("in turn", in_turn))
    found = {row["name"]: row for row in rows}
    assert {name: row["value"] for name, row in found.items() if "clock" not in name} == {
        "broken": "failed: ValueError: first line",
        "fatal": "failed: its process ended with exit code 3",
        "a | b": "failed: 2 (at most 1)",
        "missing": "failed: AttributeError: module 'made_up' has no attribute 'missing'",
        "slow begins": "1",
        "slow": "failed: stopped after 4 s",
        "after all": "1",
    }
    assert found["slow"]["note"].startswith("last line: ") and found["after all"]["numbers"] == {"device": 0.5}
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| at once | a / b | failed: 2 (at most 1) | two lines |" in table
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "[slow] the last words" in log and "Timeout (" in log, "where a job hangs is logged before it is stopped"


def test_what_the_budget_leaves_no_time_for_is_said(run: Any, schedule: Any) -> None:
    rows = schedule(run.Stage("late", (run.Job("fine", "made_up:fine", 60, ("fine",)),)), seconds=5)
    assert [row["value"] for row in rows] == ["not run: no time was left", "0 s"] and all(row["ok"] for row in rows)


def test_each_job_names_a_function_that_there_is(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    job = importlib.import_module("job")
    jobs = [each for stage in run.STAGES for each in stage.jobs]
    for each in jobs:
        code = job.load(each.function).__code__
        assert code.co_argcount == 1 + len(each.arguments) or code.co_flags & 4, each.name  # 4: it takes any number
    assert len({each.name for each in jobs}) == len(jobs)
    assert [stage.name for stage in run.STAGES][:3] == ["kernels", "tests", "learner"], "the rows of most worth come first"
    assert {each.arguments[0] for each in jobs if each.function == "speed:learner"} <= set(
        importlib.import_module("speed").LEARNERS
    )


def test_stages_run_in_the_order_asked_for_and_vllm_only_with_a_kit(run: Any) -> None:
    assert [stage.name for stage in run.choose_stages(["mfu", "kernels"], "", None)] == ["mfu", "kernels"]
    assert "vllm" not in [stage.name for stage in run.choose_stages(None, "", None)]
    assert run.choose_stages(None, "", Path("kit"))[-1].name == "vllm"
    (only,) = run.choose_stages(None, "by memory", None)
    assert [job.name for job in only.jobs] == ["publish by memory"]


def test_a_machine_without_a_gpu_is_refused(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.shutil, "which", lambda name: None)
    assert run.main([]) == 2
    assert "nvidia-smi finds no GPU here" in capsys.readouterr().err


def test_wheels_and_the_machine_hold_all_that_strop_asks_for(run: Any) -> None:
    carry = importlib.import_module("carry")

    def names(requirements: Any) -> set[str]:
        return {
            re.split(r"[=<>\[ ]", line.lower().replace("_", "-"))[0] for line in requirements if line.strip() and line[0] != "#"
        }

    there = names((FOLDER / "machine.txt").read_text().splitlines()) | names(carry.pinned())
    asked = names(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    assert asked - there == {"safetensors"}, "Transformers brings it"


@pytest.mark.slow
@pytest.mark.parametrize("device", sweep(["cpu", "sim"]))
def test_a_rehearsal_writes_the_table(device: str, tmp_path: Path) -> None:
    if device == "sim" and (reason := find_obstacle()) is not None:
        pytest.skip(reason)
    command = [sys.executable, str(FOLDER / "run.py"), "--device", device, "--stages", "decoding", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    table = (tmp_path / "table.md").read_text()
    assert f"- **Machine**: a rehearsal at tiny sizes on {device}" in table and "torch 2" in table and ", commit " in table
    assert table.count("| decoding | embedded engine") == 2 and "| decoding | clock of this stage |" in table
