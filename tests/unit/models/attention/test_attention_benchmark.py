"""``benchmarks/attention.py`` at tiny sizes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[4] / "benchmarks"


def test_the_benchmark_measures_every_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    bench = importlib.import_module("attention")
    assert bench.Tree(prompt=8, completions=4, longest=40).lengths == [25, 30, 35, 40]
    bench.main(["speed", "--lengths", "8", "--completions", "2", "--seconds", "0", "--json", str(tmp_path / "found.json")])
    said = capsys.readouterr().out
    assert all(f"| 8 | {dtype} | {kernel} |" in said for dtype in bench.DTYPES for kernel in bench.KERNELS)
    bench.main(["long", "--lengths", "64", "--completions", "2", "--dtypes", "float32"])
    assert "136 tokens, float32" in capsys.readouterr().out
