"""What others wrote moves no cursor and hides nothing on a terminal."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from strop.monitoring.console import PlainConsole
from strop.safety.printable import make_printable, shorten


def test_escape_sequences_are_shown_and_do_nothing() -> None:
    assert make_printable("\x1b]0;title\x07 \x1b[2J\r\u202eabc\ud800") == r"\x1b]0;title\x07 \x1b[2J\r\u202eabc\ud800"
    assert make_printable("one\n\ttwo äé漢 🙂") == "one\n\ttwo äé漢 🙂"
    assert shorten("a" * 500 + "b" * 500, 6) == "aaa [... 994 characters ...] bbb" and shorten("abc", 6) == "abc"


@given(st.text())
def test_every_text_can_be_written_and_printed_again(text: str) -> None:
    shown = make_printable(text)
    assert make_printable(shown) == shown
    shown.encode()


def test_a_note_of_the_console_is_printable() -> None:
    out = io.StringIO()
    PlainConsole(None, out=out).note("reward said \x1b[31mred\nand more")
    first, second = out.getvalue().splitlines()
    assert first.endswith(r"  reward said \x1b[31mred") and second.endswith("  and more")
