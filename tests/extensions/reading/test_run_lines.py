"""Runs that differ in their seed alone are one line with a band; a line is named by what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.extensions.reading.plot import BandPoint, LoggedRun, NothingToPlot, make_lines, plot_runs
from strop.monitoring.trackers.jsonl import encode_line

PNG = b"\x89PNG\r\n\x1a\n"


def a_run(name: str, *, seed: int, lr: float = 1e-5, shift: float = 0.0, **settings: Any) -> LoggedRun:
    values = {"grpo.seed": seed, "policy.optimizer.kwargs.lr": lr, "logger.log_dir": name, "checkpointing.checkpoint_dir": name}
    steps = [(step, {"train/reward": step + shift}) for step in range(1, 4)]
    return LoggedRun(name, steps, {**values, **settings})


def test_runs_that_differ_in_seed_and_folders_are_one_line_with_mean_and_range() -> None:
    (line,) = make_lines([a_run("a", seed=1), a_run("b", seed=2, shift=1.0), a_run("c", seed=3, shift=5.0)])
    assert line.label == "a, b, c (3 seeds)"
    assert line.band("train/reward") == [BandPoint(step, step + 2.0, step, step + 5.0) for step in (1.0, 2.0, 3.0)]


def test_a_seed_that_stopped_early_counts_in_the_steps_it_has() -> None:
    short = LoggedRun("short", [(1, {"train/reward": 3.0}), (2, {"train/reward": float("nan")})], a_run("b", seed=2).settings)
    (line,) = make_lines([a_run("a", seed=1), short])
    assert [(point.step, point.mean) for point in line.band("train/reward")] == [(1.0, 2.0), (2.0, 2.0), (3.0, 3.0)]


def test_lines_are_named_by_what_differs_as_shortly_as_it_can_be_said() -> None:
    runs = [a_run("a", seed=1), a_run("b", seed=2), a_run("c", seed=1, lr=3e-5)]
    assert [line.label for line in make_lines(runs)] == ["lr=1e-05 (2 seeds)", "lr=3e-05"]
    apart = make_lines(runs, group_by_seed=False)
    assert [line.label for line in apart] == ["lr=1e-05, seed=1", "lr=1e-05, seed=2", "lr=3e-05, seed=1"]
    two = [a_run("a", seed=1, **{"value.optimizer.kwargs.lr": 1}), a_run("b", seed=1, lr=2, **{"value.optimizer.kwargs.lr": 2})]
    assert [line.label for line in make_lines(two)] == [
        "a",
        "b",
    ]  # policy.optimizer.kwargs.lr=..., value.optimizer... is too long


def write_run(folder: Path, metrics: dict[str, float], steps: int = 14) -> Path:
    folder.mkdir(parents=True)
    lines = [encode_line(step, {name: value * step for name, value in metrics.items()}) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def test_runs_of_different_kinds_are_drawn_in_one_picture(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "grpo", {"train/reward": 0.1, "train/truncated": 0.0, "timing/train/total_step_time": 1.0}),
        write_run(tmp_path / "dpo", {"train/loss": 0.1, "train/accuracy": 0.01, "train/margin": 0.2}, steps=3),
    ]
    path = plot_runs(runs, [{}, {}], tmp_path / "new" / "both.png")
    assert path.read_bytes().startswith(PNG)


def test_metrics_that_nobody_logged_are_named_with_near_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", {"train/reward": 0.1, "mine/number": 1.0})
    assert plot_runs([run], [{}], tmp_path / "a.png", metrics=["mine/number"]).exists()
    with pytest.raises(NothingToPlot, match="no run has values of 'train/rewrd'; did you mean 'train/reward'"):
        plot_runs([run], [{}], tmp_path / "a.png", metrics=["train/rewrd"])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").touch()
    with pytest.raises(NothingToPlot, match=r"b/metrics\.jsonl is empty"):
        plot_runs([run, tmp_path / "b"], [{}, {}], tmp_path / "a.png")
