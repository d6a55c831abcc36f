"""The pure parts of the benchmark of weight transports."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("weight_sync")


def test_the_shapes_are_those_of_the_model(bench: Any) -> None:
    assert sum(torch.Size(shape).numel() for _, shape in bench.smol_shapes()) == 134_515_008
    assert sum(4096 * 4096 * 2 for _ in bench.even_shapes(10**9, 2)) <= 10**9


def test_a_ratio_is_that_of_rates(bench: Any) -> None:
    pairs = (bench.Pair(2.0, 1.0, 0.0), bench.Pair(4.0, 1.0, 0.5))
    measured = bench.Measured("memory", "float32", "bfloat16", True, 4 * 10**9, pairs)
    assert [spread.median for spread in measured.rates] == [1.5, 4.0]
    assert measured.row()[:3] == ["memory", "float32 as bfloat16", "yes"]
    text = bench.report([measured])
    assert "NOT A QUIET MACHINE" in text
    assert "0.500 (0.500 to 0.500) over 1 of 2" in text


def test_what_cannot_be_measured_is_refused(bench: Any) -> None:
    with pytest.raises(SystemExit):
        bench.parse(["--repeats", "0"])
