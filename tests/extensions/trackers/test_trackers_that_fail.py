"""All services at once, one of which fails: the run goes on, the others get everything, and the user reads one warning about it.

The packages are stand-ins here; `make test-adapters` has the real ones without their servers, keys and folders.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from tests.extensions.trackers.test_tracker_readers import run_in
from tests.support.adapter_servers import interpreter

from strop import packages
from strop.config import GrpoRunConfig, load_config
from strop.extensions.trackers import tensorboard
from strop.extensions.trackers.trackers_config import SERVICES
from strop.monitoring.trackers.base import CompositeTracker
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics
from strop.runs.lifecycle import make_tracker

CLASSES = {
    "tensorboard": "TensorBoardTracker",
    "wandb": "WandbTracker",
    "mlflow": "MlflowTracker",
    "swanlab": "SwanlabTracker",
    "trackio": "TrackioTracker",
}


class Stand:
    """A stand-in for the package of a service: how it opens a run, logs and ends can be replaced."""

    def __init__(self) -> None:
        self.open, self.log, self.finish = MagicMock(), MagicMock(), MagicMock()


@pytest.fixture
def stands(monkeypatch: pytest.MonkeyPatch) -> dict[str, Stand]:
    monkeypatch.setattr(packages, "is_installed", lambda name: True)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    stands = {name: Stand() for name in SERVICES}
    for name, stand in stands.items():
        run = stand.open.return_value
        if name == "mlflow":
            module = MagicMock(MlflowClient=stand.open)
            run.log_batch, run.set_terminated, run.get_experiment_by_name = stand.log, stand.finish, stand.log
            run.create_run.return_value.info.run_id = "id"
            monkeypatch.setitem(sys.modules, "mlflow.entities", MagicMock())
        elif name == "tensorboard":
            run.add_scalar, run.close = stand.log, stand.finish
            monkeypatch.setattr(tensorboard, "_import_summary_writer", lambda made=stand.open: made)
            monkeypatch.setattr(tensorboard, "_add_settings", MagicMock())
            continue
        else:
            module = MagicMock(init=stand.open, TRACKIO_DIR="trackio")
            run.log, run.finish = stand.log, stand.finish
        monkeypatch.setitem(sys.modules, name, module)
    return stands


def raising(error: BaseException) -> Callable[..., Any]:
    return MagicMock(side_effect=error)


def hang(*_: Any, **__: Any) -> None:
    threading.Event().wait()


def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CompositeTracker:
    """Log three steps to all services, as a run does. Return what it did so with, closed."""
    monkeypatch.chdir(folder)
    enabled = [f"logger.{name}_enabled=true" for name in SERVICES]
    keys = ["policy.model_name=m", f"logger.log_dir={folder}", "logger.console=none", "logger.close_timeout=0.3", *enabled]
    tracker = make_tracker(load_config(None, keys, root=GrpoRunConfig, check=False).config)
    started = time.monotonic()
    tracker.resume(-1)
    for step in (1, 2, 3):
        tracker.log(step, {"train/reward": 0.5})
        tracker.note("a note")
    tracker.close()
    assert time.monotonic() - started < 5.0
    return tracker


SITUATIONS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "the service is down": ("open", raising(ConnectionError("the network is down")), "ConnectionError: the network is down"),
    "the key is wrong": ("open", raising(PermissionError("401 Unauthorized\n<html>who are you</html>")), "401 Unauthorized"),
    "each call raises": ("log", raising(RuntimeError("no")), "RuntimeError: no"),
    "the package exits": ("log", raising(SystemExit(3)), "SystemExit: 3"),
    "a call hangs": ("log", hang, "did not finish within 0.3 s at the end of the run"),
    "the end hangs": ("finish", hang, "did not finish within 0.3 s at the end of the run (close)"),
    "the end raises": ("finish", raising(TimeoutError("gone")), "TimeoutError: gone"),
}


def list_pairs() -> Iterator[Any]:
    """Yield every service in every situation; in `make test` each service once, and each situation once."""
    for row, service in enumerate(SERVICES):
        for column, situation in enumerate(SITUATIONS):
            often = column % len(SERVICES) == row
            yield pytest.param(service, situation, id=f"{service}, {situation}", marks=() if often else pytest.mark.exhaustive)


@pytest.mark.parametrize(("service", "situation"), [*list_pairs()])
def test_one_service_that_fails_costs_one_warning_and_nothing_else(
    service: str,
    situation: str,
    stands: dict[str, Stand],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    part, behaviour, said = SITUATIONS[situation]
    getattr(stands[service], part).side_effect = behaviour
    with caplog.at_level(logging.WARNING):
        tracker = run(tmp_path, monkeypatch)
    (failure,) = tracker.failures
    assert failure.startswith(CLASSES[service]) and said in failure and "\n" not in failure
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("strop")]
    assert warning.startswith(CLASSES[service]) and said in warning
    assert [step for step, _ in read_metrics(tmp_path / METRICS_FILE)] == [1, 2, 3]
    for other in set(SERVICES) - {service}:
        assert stands[other].log.call_count >= 3 and stands[other].finish.call_count == 1


# The real packages, with nobody at the other end.
FAILING = """
import json, logging, sys, time
from pathlib import Path
from strop.monitoring.trackers.background_tracker import BackgroundTracker
from tests.extensions.trackers.test_tracker_readers import CONFIG, make_media
folder = Path(sys.argv[1])
tracker = BackgroundTracker(make(folder), close_seconds=6)
began = time.monotonic()
tracker.resume(-1)
media = make_media(folder)
for step in (1, 2):
    tracker.log_media(step, media)
    tracker.log(step, {"train/reward": 0.5})
took = time.monotonic() - began
tracker.close()
print("\\n" + json.dumps({"steps_took": took, "took": time.monotonic() - began, "failures": tracker.failures}))
"""
REAL = {
    "mlflow, its server is down": (
        "mlflow", "MlflowTracker(folder, experiment='a', tracking_uri='http://127.0.0.1:9')", {}, "did not finish within 6 s",
    ),
    "mlflow, its database is a folder": ("mlflow", "MlflowTracker(folder, experiment='a')", {"FOLDER": "mlflow.db"}, "IsADirectory"),
    "swanlab, without a key": ("swanlab", "SwanlabTracker(folder, project='a')", {}, "there is no API key of SwanLab: run `swanlab login`"),
    "swanlab, its server is down": (
        "swanlab", "SwanlabTracker(folder, project='a')",
        {"SWANLAB_API_KEY": "wrong", "SWANLAB_API_HOST": "http://127.0.0.1:9"}, "Tracker",
    ),
    "swanlab, its folder is a file": ("swanlab", "SwanlabTracker(folder, project='a', mode='offline')", {"FILE": "swanlab"}, "FileExists"),
    "trackio, its folder is a file": ("trackio", "TrackioTracker(folder, project='a')", {"FILE": "trackio"}, "FileExistsError"),
    "trackio, the hub is not reached": (
        "trackio", "TrackioTracker(folder, project='a', space_id='me/space')", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "Tracker failed",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("situation", REAL)
def test_a_real_package_that_cannot_work_holds_neither_a_step_nor_the_end(situation: str, tmp_path: Path) -> None:
    service, made, environment, said = REAL[situation]
    interpreter(service)
    extra = {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "SWANLAB_SAVE_DIR": str(tmp_path / "home"),
        "HF_TOKEN": "hf_wrong",
    } | environment
    if "FILE" in extra:
        (tmp_path / extra["FILE"]).touch()
    if "FOLDER" in extra:
        (tmp_path / extra["FOLDER"]).mkdir()
    program = f"from strop.monitoring.trackers.{service} import *\ndef make(folder):\n    return {made}\n{FAILING}"
    found = run_in(service, program, tmp_path, **extra)
    (failure,) = found["failures"]
    assert said in failure and "\n" not in failure
    assert found["steps_took"] < 1.0 and found["took"] < 8.0
