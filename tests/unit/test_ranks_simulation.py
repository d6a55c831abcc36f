"""The driver's work for a step stays bounded when there are a thousand ranks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.sweep import sweep

FOLDER = Path(__file__).parents[2] / "benchmarks"
OVERHEAD = 4_000  # bytes of a share besides its tokens, in each pass


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("ranks_simulation")


@pytest.fixture
def batch(bench: Any) -> Any:
    return bench.make_batch(64, completion=32)


@pytest.mark.parametrize("ranks", [1, 16, 256, 1024])
def test_what_the_driver_stores_is_the_batch_and_little_for_each_rank(ranks: int, bench: Any, batch: Any) -> None:
    step = bench.simulate(batch, ranks)
    prompts = 8 * 2 * bench.PROMPT * min(ranks, 1024) * bench.PASSES  # copied where a group is divided
    assert step.stored_bytes <= 1.2 * step.whole_bytes + prompts + ranks * OVERHEAD
    assert step.calls == bench.PASSES * ranks


def test_a_rank_is_sent_its_part_of_the_batch(bench: Any, batch: Any) -> None:
    sent = {ranks: bench.simulate(batch, ranks).rank_bytes for ranks in (1, 16)}
    assert sent[16] < 1.4 * sent[1] / 16 + OVERHEAD


def test_with_the_same_part_for_each_rank_no_rank_is_sent_more_when_there_are_more_ranks(bench: Any) -> None:
    few, many = (bench.simulate(bench.make_batch(ranks, completion=32), ranks) for ranks in (8, 256))
    assert many.rank_bytes < 1.5 * few.rank_bytes + OVERHEAD
    assert many.stored_bytes < 1.5 * few.stored_bytes * 256 / 8


@pytest.mark.parametrize("times", sweep([8, 16], 8))
def test_the_driver_s_seconds_grow_no_faster_than_the_batch_and_its_ranks(times: int, bench: Any) -> None:
    """Processor seconds; a bound that a step quadratic in the ranks would pass by far."""
    few, many = (bench.simulate(bench.make_batch(ranks // 2, completion=32), ranks) for ranks in (64, 64 * times))
    assert many.seconds < times * 3 * few.seconds
    assert many.seconds < 10


def test_the_tables_are_printed(bench: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bench.main(["--ranks", "1", "4", "--prompts", "4", "--json", str(tmp_path / "found.json")])
    printed = capsys.readouterr().out
    assert "the same batch" in printed and "the same part of a batch for each rank" in printed
    assert (tmp_path / "found.json").exists()
