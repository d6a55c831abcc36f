"""The fan-out, and how little it costs to import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from strop.monitoring.trackers.base import CompositeTracker, NullTracker


class Recorder(NullTracker):
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("log", step, dict(metrics)))

    def note(self, text: str) -> None:
        self.calls.append(("note", text))

    def resume(self, step: int) -> None:
        self.calls.append(("resume", step))

    def close(self) -> None:
        self.calls.append(("close",))


class Broken(NullTracker):
    def __init__(self, error: BaseException) -> None:
        self.error, self.calls = error, 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        raise self.error


def test_every_tracker_hears_everything_in_order() -> None:
    one, two = Recorder(), Recorder()
    trackers = CompositeTracker([one, two])
    trackers.resume(3)
    trackers.log(4, {"train/loss": 1.0})
    trackers.note("saved")
    trackers.close()
    trackers.close()
    assert one.calls == two.calls == [("resume", 3), ("log", 4, {"train/loss": 1.0}), ("note", "saved"), ("close",)]


def test_ctrl_c_inside_a_tracker_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        CompositeTracker([Broken(KeyboardInterrupt())]).log(1, {})


def loaded_by(module: str) -> set[str]:
    program = f"import sys, {module}; print(*(name for name in sys.modules if '.' not in name))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["trackers.base", "console", "trackers.jsonl"],
)
def test_importing_a_tracker_loads_no_heavy_library(module: str) -> None:
    heavy = {"torch", "numpy", "rich", "tensorboard", "wandb", "matplotlib", "pyarrow"}
    assert loaded_by(f"strop.monitoring.{module}") & heavy == set()


def test_importing_the_rollout_store_does_not_load_pyarrow() -> None:
    assert "pyarrow" not in loaded_by("strop.monitoring.rollout_store.rollout_store")
