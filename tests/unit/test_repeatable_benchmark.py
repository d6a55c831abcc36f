"""The benchmark of repeatable runs, at its smallest."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_every_mode_runs_and_is_compared_with_the_ordinary_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    bench = importlib.import_module("repeatable_runs")
    model = importlib.import_module("sliding_puzzle").build_model(
        tmp_path / "model", ["task 1 again", "some more words to begin with"]
    )
    options = argparse.Namespace(steps=3)
    found = [bench.measure(model, tmp_path / f"{number}", options, 0.0, mode, 0) for number, mode in enumerate(bench.MODES)]
    bench.report(found)
    printed = capsys.readouterr().out
    assert all(mode in printed for mode in bench.MODES) and all(each.seconds > 0 for each in found)
