"""The tools that are ready, by the names that configurations give them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from strop.tools.base import ParsedReply, ToolConfigError
from strop.tools.tool_options import make_tool_sets
from strop.tools.toolbox import ToolLimits, open_toolbox
from strop.types import ToolCall


def test_ready_tools_answer_the_calls_of_a_turn(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Alpha.")
    sets = make_tool_sets(["calculator", {"search": {"corpus": str(tmp_path)}}, {"files": {"max_files": 1}}])
    calls = (
        ToolCall("calculator", {"expression": "1/4 + 1/4"}),
        ToolCall("search", {"query": "alpha"}),
        ToolCall("write_file", {"path": "a", "content": "text"}),
        ToolCall("read_file", {"path": "../a"}),
    )

    async def run() -> tuple[list[str], dict[str, float]]:
        metrics: dict[str, float] = {}
        async with open_toolbox(sets, ToolLimits(), "turn") as toolbox:
            answers = await toolbox.answer(ParsedReply("", calls=calls), metrics)
        return [message.content for message in answers or ()], metrics

    said, metrics = asyncio.run(run())
    assert said[:3] == ["0.5", "[a.txt]\nAlpha.", "wrote 4 characters to a"] and "no path inside the folder" in said[3]
    assert metrics["tool_calls"] == 4 and metrics["tool_errors"] == 1


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        (["search"], "needs the option corpus"),
        ([{"search": {"corpus": "/no/such/file"}}], "the tool search: there is no corpus"),
        ([{"files": {"start": "/no/such/folder"}}], "the tool files: start is"),
        ([{"files": {"max_fils": 3}}], "did you mean 'max_files'"),
        ([{"calculator": {"digits": 3}}], "takes no options"),
        (["calculater"], "did you mean 'calculator'"),
        ([{"mcp": {"comand": ["x"]}}], "no option 'comand'; did you mean 'command'"),
        ([{"mcp": {}}], "mcp needs command"),
        ([{"mcp": {"command": "server"}}], "the option command of the tool mcp"),
        ([{"mcp": {"command": ["no_such_program"]}}], "mcp.command starts 'no_such_program', but there is no"),
    ],
)
def test_options_that_cannot_work_are_errors(tools: list[object], words: str) -> None:
    with pytest.raises(ToolConfigError, match=words):
        make_tool_sets(tools)
