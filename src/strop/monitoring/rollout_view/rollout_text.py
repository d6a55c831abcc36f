"""Rollouts as text for a terminal or a pipe."""

from __future__ import annotations

import io

from strop.monitoring.rollout_view.conversation import Conversation, ShownMessage

NARROW = 50  # columns; below, a role has a line of its own
STYLES = {"system": "magenta", "user": "cyan", "tool": "yellow", "assistant": "green"}


def format_conversation(conversation: Conversation, *, width: int, colour: bool) -> str:
    """Return a conversation as lines of at most ``width`` columns. What the policy sampled has a bar, anything else dots."""
    from rich.console import Console
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out, width=max(width, 20), force_terminal=colour, color_system="standard" if colour else None, legacy_windows=False
    )
    console.print(Rule(Text(conversation.title, style="bold"), align="left"))
    for name, value in conversation.facts:
        line = Text(f"{name}: ", style="bold red" if name == "error" else "bold")
        console.print(line.append(Text(value, style="not bold")))
    console.print()
    names = [len(message.role) for message in conversation.messages]
    for message in conversation.messages:
        style = STYLES.get(message.role, "blue")
        if width < NARROW:
            console.print(Text(message.role, style=f"bold {style}"))
        table = Table.grid(padding=(0, 1), expand=False)
        if width >= NARROW:
            table.add_column(width=min(max(names), 12), justify="right", overflow="fold")
        table.add_column(width=1)
        table.add_column(overflow="fold")
        for number, line_text in enumerate(_lines(message)):
            bar = Text("|" if message.sampled else ":", style=style)
            body = Text(line_text)
            role = [Text("" if number else message.role, style=f"bold {style}")] if width >= NARROW else []
            table.add_row(*role, bar, body)
        console.print(table)
        if message.note and message.sampled:
            console.print(Text(f"({message.note})", style="dim"), justify="right")
    return out.getvalue()


def _lines(message: ShownMessage) -> list[str]:
    return message.text.expandtabs(4).split("\n")
