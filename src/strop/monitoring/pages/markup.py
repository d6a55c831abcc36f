"""Pieces of HTML. What comes from a run, and so perhaps from a model, goes through ``escape`` and is only ever text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from strop.safety.printable import make_printable


def escape(value: object) -> str:
    """Return a value as text of a page or of an attribute in double quotes: nothing in it is markup, no character in it is hidden."""
    return html.escape(make_printable(str(value)), quote=True)


def make_table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str, numbers: bool = False) -> str:
    """Return a table of texts that scrolls by itself where it is wide; ``numbers``: all columns but the first are aligned right."""
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{escape(cell)}</th>' if index == 0 else f"<td>{escape(cell)}</td>" for index, cell in enumerate(row)
        )
        + "</tr>\n"
        for row in rows
    )
    kind = ' class="numbers"' if numbers else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table{kind}><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
    )


def make_facts(rows: Iterable[tuple[str, object]]) -> str:
    """Return names with their values."""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>\n" for name, value in rows) + "</dl>\n"


def make_paragraph(text: str, *, kind: str = "") -> str:
    return f'<p class="{escape(kind)}">{escape(text)}</p>\n' if kind else f"<p>{escape(text)}</p>\n"


def make_list(lines: Iterable[object]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>\n" for line in lines) + "</ul>\n"


def make_code(text: str) -> str:
    return f'<pre class="code" tabindex="0">{escape(text)}</pre>\n'


def make_details(summary: str, content: str) -> str:
    """Return content that is folded up until it is asked for. ``content`` is markup."""
    return f"<details><summary>{escape(summary)}</summary>\n{content}</details>\n"
