"""What a person sees: plain lines in a file, a panel on a terminal."""

from __future__ import annotations

import io
import math
import sys

import pytest

from strop.monitoring.console import PlainConsole, open_console
from strop.monitoring.console_columns import (
    Progress,
    format_fixed,
)
from strop.monitoring.trackers.base import NullTracker

METRICS = {
    "train/reward": 0.531,
    "train/loss": -0.0123,
    "train/entropy": 0.831,
    "train/kl_penalty": 1.2e-3,
    "train/token_mult_prob_error": 1.0003,
    "performance/tokens_per_sec": 1234.5,
    "timing/train/total_step_time": 4.0,
    "timing/train/generation": 2.0,
    "timing/train/policy_training": 1.5,
    "timing/train/weight_sync": 0.1,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_left_is_known_from_the_first_step_and_follows_the_wall_clock() -> None:
    clock = Clock()
    pace = Progress(10, clock)
    assert math.isnan(pace.eta_seconds)
    pace.log(1, {"timing/train/total_step_time": 4.0})
    assert pace.eta_seconds == pytest.approx(36.0)
    clock.now += 6.0  # a validation lies between the steps
    pace.log(2, {"timing/train/total_step_time": 4.0})
    assert pace.eta_seconds == pytest.approx(48.0)
    clock.now += 5.0
    assert pace.eta_seconds == pytest.approx(43.0)


def test_time_left_of_a_continued_run_counts_only_its_own_steps() -> None:
    clock = Clock()
    pace = Progress(100, clock)
    pace.resume(90)
    clock.now = 2.0
    pace.log(91, {})
    clock.now = 4.0
    pace.log(92, {})
    assert pace.eta_seconds == pytest.approx(16.0)


def rows_of(out: io.StringIO) -> list[str]:
    """The lines without their time stamps."""
    return [line[16:] for line in out.getvalue().splitlines()]


def test_a_plain_console_writes_one_aligned_ascii_line_a_step() -> None:
    out = io.StringIO()
    console = PlainConsole(100, out=out)
    for step, reward in ((1, 0.5), (10, -0.125), (100, math.nan)):
        console.log(step, {**METRICS, "train/reward": reward})
    header, *lines = rows_of(out)
    assert len(lines) == 3 and all(line.isascii() for line in lines)
    ends = [header.index(label) + len(label) for label in ("reward", "loss", "entropy", "KL", "mismatch", "tokens/s")]
    for line, reward in zip(lines, ("0.500", "-0.125", "nan"), strict=True):
        values = [line[:end].split()[-1] for end in ends]
        assert values == [reward, "-0.0123", "0.831", "0.0012", "1.0003", "1,234"]
    assert lines[0].startswith("step   1/100") and "generation 50%" in lines[0]


def test_a_step_that_was_shown_before_the_run_was_resumed_is_not_shown_again() -> None:
    out = io.StringIO()
    console = PlainConsole(4, out=out)
    console.resume(2)
    console.log(2, METRICS)
    console.note("continuing after step 2")
    console.log(3, METRICS)
    lines = rows_of(out)
    assert lines[0] == "continuing after step 2" and lines[2].startswith("step 3/4") and len(lines) == 3


@pytest.mark.parametrize(
    ("value", "decimals", "written"),
    [(-6.0e-09, 4, "0.0000"), (-0.00004, 4, "0.0000"), (10.82, 4, "10.8200"), (-0.5, 2, "-0.50"), (1234.5, 3, "1,234"),
     (0.0, 3, "0.000"), (math.nan, 3, "nan"), (5e7, 3, "5.0e+07"), (256.123, 3, "256.12")],
)  # fmt: skip
def test_a_column_has_fixed_decimals_and_no_negative_zero(value: float, decimals: int, written: str) -> None:
    assert format_fixed(value, decimals) == written


def test_a_plain_console_speaks_up_in_a_long_step_and_is_silent_in_a_short_one() -> None:
    clock, out = Clock(), io.StringIO()
    console = PlainConsole(10, out=out, clock=clock)
    console.log(1, {})
    out.truncate(0)
    console.progress("generating: 1 of 32 groups")
    assert out.getvalue() == ""
    clock.now = 61.0
    console.progress("generating: 9 of 32 groups")
    console.progress("generating: 10 of 32 groups")
    assert out.getvalue().count("\n") == 1 and "generating: 9 of 32 groups" in out.getvalue()


def test_a_plain_console_says_at_once_what_a_run_does_before_its_first_step_and_then_every_ten_seconds() -> None:
    clock, out = Clock(), io.StringIO()
    console = PlainConsole(10, out=out, clock=clock)
    console.progress("loading the model somewhere/else")
    for second in range(25):
        clock.now = float(second)
        console.progress(f"validating: {second} of 25 tasks")
    assert [line.removeprefix("... ") for line in rows_of(out)] == [
        "loading the model somewhere/else",
        *(f"validating: {second} of 25 tasks" for second in (0, 10, 20)),
    ]


def test_a_plain_console_survives_an_output_that_knows_only_ascii() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    PlainConsole(1, out=out).note("réponse")
    assert b"r?ponse" in raw.getvalue()


def test_a_redirected_output_gets_plain_lines_and_none_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(open_console(), PlainConsole)
    assert type(open_console("none")) is NullTracker


@pytest.mark.parametrize("name", ["dumb", None])
def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal(io.BytesIO(), encoding="utf-8"))
    monkeypatch.setenv("TERM", name) if name else monkeypatch.delenv("TERM", raising=False)
    console = open_console()
    assert type(console) is PlainConsole
    console.close()
