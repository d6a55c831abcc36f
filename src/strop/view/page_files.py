"""The files of the page, which are part of the package: served by name from a list, never by a path that was asked for."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}


def read_page_file(name: str) -> tuple[bytes, str] | None:
    """Return the content and the type of a file; None if there is none of this name."""
    found = {path.relative_to(PAGE).as_posix(): path for path in PAGE.rglob("*") if path.suffix in TYPES and path.is_file()}
    path = found.get(name)
    return None if path is None else (path.read_bytes(), TYPES[path.suffix])
