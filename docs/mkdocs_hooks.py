"""Let the site have the pages that lie outside docs/: README.md is its first page, CONTRIBUTING.md another.

The search finds pages by the words of search_words.yml first.

Links are written for the repository. In the site, those to the two pages and from them are turned, and those to other files of the
repository lose their link and keep their text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import yaml
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}  # in the repository -> in the site
# A search is for how things are used, not for how they were or what every attribute is.
NOT_SEARCHED = ("log/", "api/", "contributing.md", "index.md")
SEARCH_WORDS: dict[str, list[str]] = yaml.safe_load((ROOT / "docs" / "search_words.yml").read_text(encoding="utf-8"))
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    for source, target in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = re.sub(r"(!\[[^\]]*\]\()docs/", r"\1", text)
        files.append(File.generated(config, target, content=turn_links(text, source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    page.meta["search"] = {"exclude": page.file.src_uri.startswith(NOT_SEARCHED)}
    page.meta["tags"] = SEARCH_WORDS.get(page.file.src_uri, [])  # which the theme's search prefers to titles and text
    if page.file.src_uri in OUTSIDE.values():
        return markdown
    return turn_links(markdown, f"docs/{page.file.src_uri}")


def turn_links(text: str, source: str) -> str:
    """``source`` is the page's path in the repository."""
    here = posixpath.dirname(site_path(source) or "")

    def turned(found: re.Match[str]) -> str:
        words, link = found.groups()
        path, _, anchor = link.partition("#")
        if not path or ":" in path:
            return found[0]
        target = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(source), path)))
        if target is None:
            return words
        return f"[{words}]({posixpath.relpath(target, here or '.')}{'#' + anchor if anchor else ''})"

    return LINK.sub(turned, text)


def site_path(path: str) -> str | None:
    """Where a file of the repository is in the site; None if it is not there."""
    return OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
