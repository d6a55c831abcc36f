"""The benchmark of asynchronous training, at its smallest."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("async_gain")


def test_one_step_ahead_takes_as_long_as_the_longer_of_generation_and_training(bench, monkeypatch):
    """Of the best of six steps: on a busy machine the loop's own work, such as packing, takes several times as long."""
    monkeypatch.setattr(bench, "WARM_UP", 2)
    seconds, groups = 0.25, 2
    together, apart = (
        bench.measure(setting, generation=bench.constant(seconds), training=bench.constant(seconds), groups=groups, steps=steps)
        for setting, steps in zip(bench.SETTINGS[:2], (2, 6), strict=True)
    )
    assert together.setting.max_staleness == 0 and apart.setting.max_staleness == 1
    assert min(together.steps) >= 2 * seconds
    assert min(apart.steps) <= 1.1 * seconds and median(apart.steps) < 1.5 * seconds
    assert apart.staleness == 1


@pytest.mark.exhaustive
def test_with_long_tails_running_further_ahead_waits_less(bench):
    settings = {setting.name: setting for setting in bench.SETTINGS}
    names = ("k=1 drained", "k=4 in flight")
    drained, ahead = (
        bench.measure(settings[name], generation=bench.long_tail(0.02), training=bench.constant(0.02), groups=8, steps=30)
        for name in names
    )
    assert sum(ahead.steps) < 0.7 * sum(drained.steps)
    assert sum(drained.drained) + sum(drained.waited) > sum(ahead.waited)


def test_the_table_says_what_k_0_is_made_of(bench):
    found = [
        bench.Measured(setting=setting, steps=[seconds], waited=[1.0], trained=[2.0], drained=[0.0], staleness=0.0, stale=0)
        for setting, seconds in zip(bench.SETTINGS, (3.0, 2.0), strict=False)
    ]
    said = bench.report(found)
    assert "generation 1.000 s, training 2.000 s; max 2.000, sum 3.000" in said
    row = said.splitlines()[-1].split()
    assert row[:2] == ["k=1", "drained"] and "1.00" in row and "1.50" in row
