"""`strop plot RUN` finds the run, draws what there is, and says what is missing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import strop
from strop.extensions.reading.plot import SMOOTH_ABOVE, NothingToPlot, find_metrics, make_run_figure, plot_run
from strop.monitoring.console_columns import format_number
from strop.monitoring.trackers.jsonl import JsonlTracker
from support.reported_runs import write_run

PNG = b"\x89PNG\r\n\x1a\n"


def a_run(folder: Path, steps: int = 20) -> Path:
    tracker = JsonlTracker(folder)
    tracker.log(0, {"validation/accuracy": 0.1})
    for step in range(1, steps + 1):
        tracker.log(step, {
            "train/reward": step / steps,
            "train/loss": math.nan if step == 3 else 0.1 / step,
            "timing/train/total_step_time": 2.0,
            "timing/train/generation": 1.0,
            "timing/train/something_new": 0.5,
        })  # fmt: skip
    tracker.close()
    return folder


def test_a_run_is_drawn_into_its_folder(tmp_path: Path) -> None:
    path = plot_run(a_run(tmp_path / "run"))
    assert path == tmp_path / "run" / "curves.png"
    assert path.read_bytes().startswith(PNG)


def test_a_run_is_found_by_its_folder_its_file_and_the_folder_above(tmp_path: Path) -> None:
    expected = a_run(tmp_path / "logs" / "run", steps=1) / "metrics.jsonl"
    assert find_metrics(expected) == find_metrics(expected.parent) == find_metrics(tmp_path / "logs") == expected


@pytest.mark.parametrize("steps", [0, 1, 2, 450])
def test_short_and_long_runs_are_drawn(tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    assert plot_run(a_run(tmp_path, steps)).read_bytes().startswith(PNG)


@pytest.mark.parametrize("values", [[0.5] * 39 + [0.1987], [float(step) for step in range(30)], [0.0] * 13 + [1.0], [0.3, 0.7]])
def test_the_number_of_a_panel_is_the_last_steps_and_an_average_is_called_one(tmp_path: Path, values: list[float]) -> None:
    tracker = JsonlTracker(tmp_path)
    for step, value in enumerate(values, 1):
        tracker.log(step, {"train/reward": value})
    tracker.close()
    figure = make_run_figure(tmp_path / "metrics.jsonl")
    assert [text.get_text() for text in figure.axes[0].texts] == [format_number(values[-1])]
    said = figure._supxlabel.get_text() if figure._supxlabel is not None else ""
    assert ("moving average" in said) == (len(values) > SMOOTH_ABOVE)


def test_a_run_that_is_still_writing_its_last_line_is_drawn(tmp_path: Path) -> None:
    with (a_run(tmp_path) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "train/rew')
    assert plot_run(tmp_path).exists()


def test_what_cannot_be_drawn_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(NothingToPlot, match=r"there is no .*nowhere; give the log folder"):
        plot_run(tmp_path / "nowhere")
    with pytest.raises(NothingToPlot, match=r"no metrics.jsonl in"):
        plot_run(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(NothingToPlot, match="is empty"):
        plot_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "mine/number": 2}\n')
    with pytest.raises(NothingToPlot, match="none of train/reward"):
        plot_run(tmp_path)


def test_a_folder_of_several_runs_asks_which(tmp_path: Path) -> None:
    a_run(tmp_path / "one", steps=1)
    a_run(tmp_path / "two", steps=1)
    with pytest.raises(NothingToPlot, match=r"2 runs \(one, two\)"):
        plot_run(tmp_path)


def test_the_curves_are_a_figure_and_a_metric_that_is_not_there_is_said(tmp_path: Path) -> None:
    run = strop.Run(write_run(tmp_path / "mine"))
    assert run.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert len(run.plot("train/reward", "train/entropy").axes) == 2
    with pytest.raises(ValueError, match="did you mean 'train/reward'"):
        run.plot("train/rewrd")
