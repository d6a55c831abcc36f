"""The benchmark of the learner's layers, with a tiny model."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from support.models import VOCABULARY, build


def test_the_benchmark_reports_both_sides_and_equal_hidden_states(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    benchmark = importlib.import_module("learner_layers")
    batch = benchmark.make_batch(VOCABULARY, 2, 3, 5, 8)
    assert batch.num_groups == 2 and batch.num_sequences == 6 and len(batch.segment_start) == 8
    build("llama").save_pretrained(tmp_path)
    found = benchmark.measure(str(tmp_path), "float32", benchmark.parse(["--pairs", "2", "--threads", "1"]))
    assert found.difference == 0.0
    assert "modules / fused" in benchmark.report(found)
