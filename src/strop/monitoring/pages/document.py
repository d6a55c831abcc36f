"""A page in one HTML file that needs no network, can be printed, and follows the dark mode of its reader.

A content security policy allows the page's own style and script by their hashes and nothing else: what a model wrote can neither run nor
load anything, even if it came to stand in the page as markup.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from strop.monitoring.pages.markup import escape
from strop.storage.atomic_file import atomic_write

_PLACEHOLDER = re.compile(r"\{(policy|title|summary|contents|sections|footer)\}")


@dataclass(frozen=True)
class PageSection:
    """A part of a page: the name that links to it, its heading, and its content, which is markup."""

    name: str
    title: str
    content: str


def make_document(title: str, summary: str, sections: Sequence[PageSection], *, footer: str) -> str:
    """Return the page. ``title``, ``summary`` and ``footer`` are texts."""
    template = files("strop.monitoring.pages").joinpath("document.html").read_text(encoding="utf-8")
    parts = {
        "policy": make_policy(template),
        "title": escape(title),
        "summary": escape(summary),
        "contents": "".join(f'<li><a href="#{escape(each.name)}">{escape(each.title)}</a></li>' for each in sections),
        "sections": "\n".join(
            f'<section id="{escape(each.name)}" aria-labelledby="{escape(each.name)}-title">\n'
            f'<h2 id="{escape(each.name)}-title">{escape(each.title)}</h2>\n{each.content}</section>'
            for each in sections
        ),
        "footer": escape(footer),
    }
    return _PLACEHOLDER.sub(lambda match: parts[match[1]], template)


def make_policy(template: str) -> str:
    """Return the content security policy of a page: its one style and its one script, and nothing else."""
    style, script = (_hash(re.findall(rf"<{name}>(.*?)</{name}>", template, re.DOTALL)[0]) for name in ("style", "script"))
    return f"default-src 'none'; style-src {style}; script-src {script}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write_document(path: Path, page: str) -> None:
    """Write a page, whole or not at all. Raises OSError."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name the file to write", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
