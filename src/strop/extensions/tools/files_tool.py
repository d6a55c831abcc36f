"""Files of an episode as tools. They exist only in memory: no path reaches this machine's files, and nothing is left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from strop.safety.printable import shorten
from strop.tools.base import Tool, ToolError


@dataclass(frozen=True, kw_only=True)
class FilesTool:
    """``list_files``, ``read_file``, ``write_file`` and ``replace_in_file`` in the episode's own folder."""

    start: str | None = None  # a folder with the initial text files; links in it are ignored
    max_files: int = 64
    max_file_chars: int = 65_536
    max_output_chars: int = 8000  # limit of one read; the middle of longer text is cut

    def __post_init__(self) -> None:
        if min(self.max_files, self.max_file_chars, self.max_output_chars) < 1:
            raise ValueError("its limits must be at least 1")
        if self.start is not None and not Path(self.start).is_dir():
            raise ValueError(f"start is {self.start!r}, which is no folder")

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Sequence[Tool]]:
            folder = ScratchFolder(self)
            if self.start is not None:
                folder.copy(Path(self.start))
            yield folder.tools()

        return opened()


@dataclass
class ScratchFolder:
    """A folder in memory: text by path."""

    rules: FilesTool
    texts: dict[str, str] = field(default_factory=dict)

    def copy(self, source: Path) -> None:
        for path in sorted(source.rglob("*")):
            folders = [each for each in path.parents if source in each.parents]
            if path.is_file() and not any(each.is_symlink() for each in (path, *folders)):
                self.write(path.relative_to(source).as_posix(), path.read_text(encoding="utf-8-sig", errors="replace"))

    def describe(self) -> str:
        return "\n".join(f"{path} ({len(text)} characters)" for path, text in sorted(self.texts.items())) or "(no files)"

    def read(self, path: str, first_line: int = 1, lines: int | None = None) -> str:
        text = self._find(path)
        if first_line < 1 or (lines is not None and lines < 1):
            raise ToolError("first_line and lines count from 1")
        if first_line > 1 or lines is not None:
            end = None if lines is None else first_line - 1 + lines
            text = "".join(text.splitlines(keepends=True)[first_line - 1 : end])
        return shorten(text, self.rules.max_output_chars, around="\n") or "(empty)"

    def write(self, path: str, content: str) -> str:
        name = clean_path(path)
        if len(content) > self.rules.max_file_chars:
            raise ToolError(f"the text has {len(content)} characters; a file has at most {self.rules.max_file_chars}")
        if name not in self.texts and len(self.texts) >= self.rules.max_files:
            raise ToolError(f"there are {len(self.texts)} files; more are not allowed")
        inside = next((each for each in self.texts if each.startswith(f"{name}/") or name.startswith(f"{each}/")), None)
        if inside is not None:
            raise ToolError(f"{name!r} cannot be a file next to {inside!r}: one of them would be a folder")
        self.texts[name] = content
        return f"wrote {len(content)} characters to {name}"

    def replace(self, path: str, old: str, new: str) -> str:
        text = self._find(path)
        count = text.count(old) if old else 0
        if count != 1:
            raise ToolError(f"the old text occurs {count} times in {path!r}; it must occur exactly once")
        self.write(path, text.replace(old, new))
        return f"replaced it in {clean_path(path)}"

    def _find(self, path: str) -> str:
        name = clean_path(path)
        if name not in self.texts:
            raise ToolError(f"there is no file {name!r}; there are: {', '.join(sorted(self.texts)[:20]) or 'none'}")
        return self.texts[name]

    def tools(self) -> tuple[Tool, ...]:
        path = {"path": {"type": "string", "description": "Path of the file in the folder, such as notes/plan.md."}}
        count = {"type": "integer", "minimum": 1}
        return (
            Tool("list_files", "List the files of the folder.", _object({}, ()), self.describe),
            Tool(
                "read_file",
                "Read a file, or some lines of it.",
                _object({**path, "first_line": count, "lines": count}, ("path",)),
                self.read,
            ),
            Tool(
                "write_file",
                "Write a file. What it had before is lost.",
                _object({**path, "content": {"type": "string"}}, ("path", "content")),
                self.write,
            ),
            Tool(
                "replace_in_file",
                "Replace a text that occurs exactly once in a file.",
                _object({**path, "old": {"type": "string"}, "new": {"type": "string"}}, ("path", "old", "new")),
                self.replace,
            ),
        )


def clean_path(path: str) -> str:
    """Return a path in its shortest form. Raises ToolError for one that leaves the folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith(("/", "~")) or ".." in parts or len(path) > 200 or not path.isprintable() or "\\" in path:
        raise ToolError(
            f"{path[:80]!r} is no path inside the folder: write one such as notes/plan.md, without '..' and without '/' at its start"
        )
    return "/".join(parts)


def _object(properties: dict[str, Any], required: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}
