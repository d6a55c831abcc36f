"""Report tables, for a terminal or a pipe."""

from __future__ import annotations

import io
from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int, colour: bool) -> str:
    """Return a table: the first column is text, the others are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, safe_box=True)
    for number, name in enumerate(header):
        if number:
            table.add_column(Text(name), justify="right", no_wrap=True)
        else:
            table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    out = io.StringIO()
    console = Console(
        file=out, width=max(width, 60), force_terminal=colour, color_system="standard" if colour else None, legacy_windows=False
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().replace("\u2500", "-").strip("\n").split("\n"))
