"""The benchmark of a GPU's day, on a CPU at tiny shapes and without pydantic; and how it treats measurements that fail."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
MADE_UP = """
import os, time
from measurement import Reading

def fine(target, name): return [Reading(name=name, value="1")]
def broken(target): raise ValueError("first line\\nsecond line")
def slow(target): time.sleep(60)
def fatal(target): os._exit(3)
def wrong(target): return [Reading(name="wrong", value="failed: 2 (at most 1)", ok=False)]
"""


@pytest.fixture
def measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "made_up_measurements.py").write_text(MADE_UP)
    for folder in (FOLDER, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("measurement")
    for name in ("measurement", "made_up_measurements"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_a_measurement_that_fails_is_a_row_and_the_others_go_on(measurement: Any) -> None:
    made_up = importlib.import_module("made_up_measurements")
    asked = [
        measurement.Measurement("broken", made_up.broken, 30),
        measurement.Measurement("fine", made_up.fine, 30, ("after an error",)),
        measurement.Measurement("fatal", made_up.fatal, 30),
        measurement.Measurement("slow", made_up.slow, 1.0),
        measurement.Measurement("wrong", made_up.wrong, 30),
        measurement.Measurement("fine", made_up.fine, 30, ("after all",)),
    ]
    rows = list(measurement.run_all(asked, measurement.Target("cpu", True), 200))
    assert [(row.name, row.value, row.ok) for row in rows] == [
        ("broken", "failed: ValueError: first line", False),
        ("after an error", "1", True),
        ("fatal", "failed: its process ended with exit code 3", False),
        ("slow", "failed: it took longer than 1 s", False),
        ("wrong", "failed: 2 (at most 1)", False),
        ("after all", "1", True),
    ]
    assert "| fatal | failed: its process ended with exit code 3 |  |" in measurement.format_table("here", rows)


def test_what_the_limit_leaves_no_time_for_is_said(measurement: Any) -> None:
    made_up = importlib.import_module("made_up_measurements")
    (row,) = measurement.run_all([measurement.Measurement("slow", made_up.slow, 60)], measurement.Target("cpu", True), 2)
    assert row.value == "failed: no time was left of 2 s" and not row.ok


@pytest.mark.slow
def test_the_day_of_a_gpu_runs_on_a_cpu_without_pydantic(tmp_path: Path) -> None:
    for name in ("pydantic", "pydantic_core"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('hidden')\n")
    found = tmp_path / "found.json"
    command = [sys.executable, str(FOLDER / "run.py"), "--device", "cpu", "--tiny", "--sizes", "0.5B", "--json", str(found)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "with a stand-in for pydantic" in done.stdout
    rows = json.loads(found.read_text())["rows"]
    names = "\n".join(row["name"] for row in rows)
    for part in ("gradients, float64", "output layer", "sampler and learner", "CUDA graphs", "offload", "gloo", "memory"):
        assert part in names, "parity"
    for part in ("matrix rate", "bandwidth", "learner, 0.5B", "decoding, 0.5B", "publish on the device, 0.5B"):
        assert part in names, "speed"
    assert all(row["ok"] for row in rows)


def test_a_machine_without_a_gpu_is_refused(
    measurement: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("PYTHONPATH", "")  # which the benchmark sets for its processes
    main = runpy.run_path(str(FOLDER / "run.py"))["main"]
    for arguments, reason in (([], "torch sees no GPU here"), (["--device", "cpu"], "would take hours")):
        assert main(arguments) == 2
        assert reason in capsys.readouterr().err
