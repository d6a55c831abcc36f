"""Typed functions as tools: what the schema says, what is checked, and what comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import pytest

from strop.tools.base import ToolConfigError, ToolError
from strop.tools.tool_options import make_tool, read_docstring


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: float
    y: float = 0.0


def paint(
    where: Point,
    colour: Colour = Colour.RED,
    mode: Literal["fill", "line"] = "fill",
    tags: list[str] | None = None,
    schema: Annotated[int, "a number of a kind"] = 3,
) -> dict[str, Any]:
    """Paint something.

    Args:
        where (Point): the place,
            in metres
        colour: its colour: red or blue

    Returns:
        What was painted.
    """
    return {"where": where, "colour": colour, "mode": mode, "tags": tags, "schema": schema}


def test_the_schema_follows_from_types_and_docstring() -> None:
    tool = make_tool(paint)
    assert (tool.name, tool.description) == ("paint", "Paint something.")
    properties = tool.parameters["properties"]
    assert tool.parameters["required"] == ["where"]
    assert properties["where"]["description"] == "the place, in metres"
    assert properties["where"]["properties"]["x"] == {"type": "number"} and properties["where"]["required"] == ["x"]
    assert properties["colour"] == {
        "default": "red",
        "enum": ["red", "blue"],
        "type": "string",
        "description": "its colour: red or blue",
    }
    assert properties["mode"]["enum"] == ["fill", "line"]
    assert properties["tags"]["anyOf"] == [{"items": {"type": "string"}, "type": "array"}, {"type": "null"}]
    assert properties["schema"] == {"default": 3, "type": "integer", "description": "a number of a kind"}
    json.dumps(tool.schema)


def test_arguments_become_what_the_function_takes_and_data_becomes_json() -> None:
    text = make_tool(paint).function(where={"x": 1}, colour="blue", tags=["ä"])
    assert json.loads(str(text)) == {"where": {"x": 1.0, "y": 0.0}, "colour": "blue", "mode": "fill", "tags": ["ä"], "schema": 3}
    assert "ä" in str(text)


def test_all_that_is_wrong_with_the_arguments_is_told() -> None:
    with pytest.raises(ToolError) as told:
        make_tool(paint).function(where={"x": "1"}, colour="green", more=1)
    for part in (
        "where.x: input should be a valid number, found '1'",
        "colour: input should be 'red' or 'blue'",
        "more: extra inputs",
    ):
        assert part in str(told.value)


def test_async_functions_stay_async() -> None:
    async def later(number: int) -> str:
        await asyncio.sleep(0)
        return f"got {number}"

    result: Any = make_tool(later).function(number=3)
    assert asyncio.run(result) == "got 3"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x, "has no type"),
        (lambda *numbers: 1, "parameters of tools are given by name"),
    ],
)
def test_a_function_without_types_is_refused(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(ToolConfigError, match=said):
        make_tool(function, name="f")


def test_a_type_that_is_no_json_is_refused() -> None:
    def hold(lock: asyncio.Lock) -> None: ...

    with pytest.raises(ToolConfigError, match="cannot be"):
        make_tool(hold)


GOOGLE = """Find pages.

It looks everywhere.

Args:
    query: What to look for.
        On two lines.
    limit (int, optional): How many.

Returns:
    Pages.
"""
NUMPY = """Find pages.

It looks everywhere.

Parameters
----------
query : str
    What to look for.
    On two lines.
limit : int, optional
    How many.

Returns
-------
list
    Pages.
"""
SPHINX = """Find pages.

It looks everywhere.

:param query: What to look for.
    On two lines.
:param int limit: How many.
:returns: Pages.
"""


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX])
def test_docstrings_of_three_styles_say_the_same(text: str) -> None:
    found = read_docstring(text)
    assert found.description == "Find pages.\n\nIt looks everywhere."
    assert found.parameters == {"query": "What to look for. On two lines.", "limit": "How many."}


def test_a_docstring_without_sections_is_the_description() -> None:
    assert read_docstring("One line.").description == "One line." and read_docstring(None).description == ""
