"""The panel on a terminal."""

from __future__ import annotations

import io
import math
import re
import sys

import pytest
from rich.console import Console

from strop.extensions.reading.live_console import LiveConsole
from strop.monitoring.console import open_console

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


def terminal(width: int = 100, height: int = 40) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", width=width, height=height, legacy_windows=False
    )


def drawn(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def last_drawing(console: Console) -> str:
    """The text of the last redraw, without escape codes."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn(console))
    return text[text.rindex("╭") :] if "╭" in text else text


def test_a_terminal_that_moves_its_cursor_gets_the_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal(io.BytesIO(), encoding="utf-8"))
    monkeypatch.setenv("TERM", "xterm-256color")
    console = open_console()
    assert type(console) is LiveConsole
    console.close()


@pytest.mark.parametrize(("width", "height"), [(200, 50), (100, 40), (64, 40), (50, 40), (30, 20), (12, 5), (100, 5)])
def test_the_live_console_fits_every_terminal(width: int, height: int) -> None:
    screen = terminal(width, height)
    console = LiveConsole(60, title="addition", console=screen)
    console.progress("generating 12/32 groups")
    console.log(12, METRICS)
    console.close()
    assert max(len(line) for line in last_drawing(screen).splitlines()) <= width
    assert "12/60" in last_drawing(screen) or width < 20


def test_the_live_console_shows_what_matters() -> None:
    clock, screen = Clock(), terminal()
    console = LiveConsole(60, title="addition", console=screen, clock=clock)
    console.log(0, {"validation/accuracy": 0.12})
    for step in (11, 12):
        clock.now += 5.0
        console.log(step, METRICS)
    console.progress("generating 12/32 groups")
    text = "".join(part.text for part in screen.render(console.render()))
    expected = [
        *("addition", "step 12/60", "20%", "left", "generating 12/32 groups"),
        *("0.531", "-0.0123", "0.831", "0.0012", "1.0003", "1,234", "accuracy 0.120", "@0"),
        *("step time 4.0 s", "generation 50% ━", "training 38% ━", "other 10% ━"),
    ]
    text = re.sub(" +", " ", text)
    assert [words for words in expected if words not in text] == []
    console.close()
    assert "stopped at step 12 after 0:10" in last_drawing(screen)


def test_the_live_console_draws_values_that_are_missing_or_not_finite() -> None:
    screen = terminal()
    console = LiveConsole(None, console=screen)
    console.log(1, {})
    console.log(2, {"train/loss": math.nan, "train/reward": math.inf, "timing/train/generation": math.nan})
    console.close()
    assert "nan" in last_drawing(screen) and "inf" in last_drawing(screen)


def test_notes_scroll_by_above_the_panel_as_they_were_written() -> None:
    screen = terminal()
    console = LiveConsole(5, console=screen)
    console.log(1, METRICS)
    console.note("saved [bold]results/step_1[/bold]\nand more")
    console.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn(screen))
    assert "saved [bold]results/step_1[/bold]" in text and "and more" in text
    assert text.index("and more") < text.rindex("╭")


def test_closing_gives_the_cursor_back_and_later_calls_are_harmless() -> None:
    screen = terminal()
    console = LiveConsole(5, console=screen)
    console.log(1, METRICS)
    assert "\x1b[?25l" in drawn(screen)
    console.close()
    console.close()
    console.log(2, METRICS)
    console.progress("training")
    assert drawn(screen).rindex("\x1b[?25h") > drawn(screen).rindex("\x1b[?25l")
