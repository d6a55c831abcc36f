"""The examples of docs/tools.md, as they stand there."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from strop.environments.registry import make_environment
from strop.tools.call_formats import FORMATS
from strop.tools.tool_options import ToolOptions

PAGE = (Path(__file__).parents[3] / "docs" / "tools.md").read_text("utf-8")


def test_the_example_function_is_a_tool(tmp_path: Path) -> None:
    code = re.findall(r"```python\n# tools.py\n(.*?)```", PAGE, re.DOTALL)[0]
    (tmp_path / "tools.py").write_text(code)
    environment = make_environment("arithmetic", {"tools": [f"{tmp_path}/tools.py:weather"]})

    async def ask() -> str:
        async with environment.open_tools() as box:
            properties = box.offer.schemas[0]["function"]["parameters"]["properties"]
            assert properties["city"]["description"] == "Name of a city, in English."
            assert properties["hours"]["description"] == "how far to look ahead"
            result: Any = await box.tools["weather"].function(city="Paris")
            return str(result)

    assert asyncio.run(ask()) == '{"city": "Paris", "day": "today", "degrees": 21, "hours": 24}'


def test_the_table_of_options_is_that_of_the_environments() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE.split("## A function")[0], re.MULTILINE))
    options = ToolOptions()
    assert set(rows) == {each.name for each in fields(ToolOptions)}
    for name, shown in rows.items():
        value = getattr(options, name)
        words = {(): "none", None: "no limit"}
        assert shown.strip("`") == (
            words[value] if value in words else f"{value:g}" if type(value) is float else str(value).lower()
        )


def test_every_format_is_in_the_table() -> None:
    table = PAGE.split("## How a model writes calls")[1].split("## After")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(FORMATS)
