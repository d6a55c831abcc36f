"""The scratch folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from strop.extensions.tools.files_tool import FilesTool, ScratchFolder, clean_path
from strop.tools.base import ToolError


@pytest.fixture
def folder() -> ScratchFolder:
    return ScratchFolder(FilesTool(max_files=2, max_file_chars=40, max_output_chars=30))


def test_files_are_written_read_and_changed(folder: ScratchFolder) -> None:
    assert folder.describe() == "(no files)"
    assert folder.write("./notes//plan.md", "one\ntwo\nthree\n") == "wrote 14 characters to notes/plan.md"
    assert folder.replace("notes/plan.md", "two", "2") == "replaced it in notes/plan.md"
    assert folder.read("notes/plan.md", first_line=2, lines=1) == "2\n"
    assert folder.describe() == "notes/plan.md (12 characters)"
    folder.write("b", "x" * 40)
    assert "[... 10 characters ...]" in folder.read("b")


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "~/x", "", ".", "a\0b", "a\nb", "a" * 201, "..\\x"])
def test_no_path_leads_out_of_the_folder(path: str) -> None:
    with pytest.raises(ToolError, match="no path inside the folder"):
        clean_path(path)


def test_limits_are_said(folder: ScratchFolder) -> None:
    folder.write("a", "1")
    folder.write("b/c", "2")
    for call, words in (
        (lambda: folder.write("d", ""), "more are not allowed"),
        (lambda: folder.write("a", "x" * 41), "at most 40"),
        (lambda: folder.replace("a", "1", "x" * 41), "at most 40"),
        (lambda: folder.replace("a", "2", "3"), "occurs 0 times"),
        (lambda: folder.replace("a", "", "3"), "occurs 0 times"),
        (lambda: folder.read("x"), "there are: a, b/c"),
        (lambda: folder.read("a", first_line=0), "count from 1"),
    ):
        with pytest.raises(ToolError, match=words):
            call()
    roomy = ScratchFolder(FilesTool())
    roomy.write("a", "1")
    with pytest.raises(ToolError, match="would be a folder"):
        roomy.write("a/b", "2")


def test_each_episode_has_a_folder_of_its_own_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    start = tmp_path / "start"
    start.mkdir()
    (start / "a.txt").write_text("given")
    (start / "link").symlink_to(tmp_path / "secret")
    (start / "links").symlink_to(tmp_path)

    async def episode() -> list[str]:
        async with FilesTool(start=str(start)).open() as tools:
            calls = {tool.name: tool.function for tool in tools}
            before = str(calls["list_files"]())
            calls["write_file"](path="a.txt", content="changed")
            return [before, str(calls["read_file"](path="a.txt"))]

    assert asyncio.run(episode()) == asyncio.run(episode()) == ["a.txt (5 characters)", "changed"]
    assert (start / "a.txt").read_text() == "given"
    with pytest.raises(ValueError, match="which is no folder"):
        FilesTool(start=str(tmp_path / "none"))
