"""Rollouts as text for a terminal or a pipe."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from strop.monitoring.rollout_view.shown_rollout import ShownMessage, ShownRollout

if TYPE_CHECKING:
    from rich.table import Table

NARROW = 50  # columns; below this, a role gets a separate line
WIDEST_ROLE = 12
LONGEST_REASONING = 200  # characters of reasoning kept outside of a message
STYLES = {"system": "magenta", "user": "cyan", "tool": "yellow", "assistant": "green"}


def format_rollout(shown: ShownRollout, *, width: int, colour: bool, unfold: bool = False) -> str:
    """Return a rollout as lines of at most ``width`` columns; ``unfold`` shows all reasoning.

    The policy's text is marked by a bar, anything else by dots."""
    from rich.console import Console
    from rich.rule import Rule
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out, width=max(width, 20), force_terminal=colour, color_system="standard" if colour else None, legacy_windows=False
    )
    console.print(Rule(Text(shown.title, style="bold"), align="left", characters="-"))
    for name, value in shown.facts:
        line = Text(f"{name}: ", style="bold red" if name == "error" else "bold")
        console.print(line.append(Text(value, style="not bold")))
    console.print()
    role_width = 0 if width < NARROW else min(max((len(message.role) for message in shown.messages), default=0), WIDEST_ROLE)
    for message in shown.messages:
        if not role_width:
            console.print(Text(message.role, style=_style(message)))
        console.print(_make_table(message, role_width, LONGEST_REASONING if not unfold else None))
        if message.note and message.sampled:
            console.print(Text(f"({message.note})", style="dim"), justify="right")
    return "\n".join(line.rstrip(" ") for line in out.getvalue().split("\n"))


def _make_table(message: ShownMessage, role_width: int, most: int | None) -> Table:
    """Return a message as columns: its role, if it has a width, the bar, and its text."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    if role_width:
        table.add_column(width=role_width, justify="right", overflow="fold")
    table.add_column(width=1)
    table.add_column(overflow="fold")
    lines = [*_fold_reasoning(message, most), *message.text.expandtabs(4).split("\n")]
    for number, line in enumerate(lines):
        role = [Text("" if number else message.role, style=_style(message))] if role_width else []
        table.add_row(*role, Text("|" if message.sampled else ":", style=_style(message)), Text(line))
    return table


def _fold_reasoning(message: ShownMessage, most: int | None) -> list[str]:
    """Return the reasoning of a message on one line, at most ``most`` characters of it; nothing without any."""
    if not message.reasoning:
        return []
    text = " ".join(message.reasoning.split())
    beginning = text if most is None or len(text) <= most else f"{text[:most]}..."
    return [f"[reasoning, {message.origin}: {beginning}]"]


def _style(message: ShownMessage) -> str:
    return f"bold {STYLES.get(message.role, 'blue')}"
