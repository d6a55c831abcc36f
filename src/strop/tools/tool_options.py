"""The tool options of every environment."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import MISSING, dataclass
from functools import cached_property
from typing import Any, Literal, get_type_hints

from strop import plugins
from strop.tools.base import Tool, ToolConfigError, ToolSet
from strop.tools.function_tool import make_tool
from strop.tools.toolbox import Toolbox, ToolLimits, open_toolbox
from strop.user_code import UserCodeError, explain_invalid, import_attribute, suggest_names


@dataclass(frozen=True)
class SingleTool:
    """A tool without state between calls."""

    tool: Tool

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        @asynccontextmanager
        async def opened() -> Any:
            yield (self.tool,)

        return opened()


def make_tool_sets(tools: Any) -> tuple[tuple[str, ToolSet], ...]:
    """Return the tool sets in a list, each with its name. Raises ToolConfigError.

    An item is a name (``python``), a function (``file.py:function``, ``module:function``), or one of these with options
    (``{search: {corpus: notes.jsonl}}``); in Python also a function, a ``Tool`` or a ``ToolSet`` itself.
    """
    items = [tools] if isinstance(tools, str | Mapping | Tool) or callable(tools) or hasattr(tools, "open") else tools
    if not isinstance(items, Sequence):
        raise ToolConfigError(f"tools is {tools!r:.80}, not a list of tools")
    return tuple(_make_set(item) for item in items)


def _make_set(item: Any) -> tuple[str, ToolSet]:
    if isinstance(item, Mapping):
        if len(item) != 1 or not isinstance(options := next(iter(item.values())), Mapping | None):
            raise ToolConfigError(f"tools has the item {item!r:.120}; a tool with options is written {{NAME: {{OPTION: VALUE}}}}")
        return _make_named(str(next(iter(item))), options or {})
    if isinstance(item, str):
        return _make_named(item, {})
    return _wrap(item, getattr(item, "__name__", type(item).__name__), {})


def _make_named(name: str, options: Mapping[str, Any]) -> tuple[str, ToolSet]:
    path = plugins.find_path("tools", name) or name
    if ":" not in path:
        raise ToolConfigError(
            f"there is no tool {name!r}{suggest_names(name, plugins.declared('tools'))}; name your own as file.py:function"
        )
    try:
        found = import_attribute(path)
    except UserCodeError as error:
        raise ToolConfigError(f"tools: {error}") from error
    return _wrap(found, name, options)


def _wrap(found: Any, name: str, options: Mapping[str, Any]) -> tuple[str, ToolSet]:
    """Return a tool set for a named object: a tool set class, a tool set, a tool, or a function."""
    title = name.rpartition(":")[2]
    if isinstance(found, type) and hasattr(found, "open"):
        return title, _build(found, name, options)
    if options:
        raise ToolConfigError(f"the tool {name} takes no options; remove {', '.join(sorted(options))}")
    if isinstance(found, Tool):
        return title, SingleTool(found)
    if hasattr(found, "open"):
        return title, found
    if not callable(found) or isinstance(found, type):
        raise ToolConfigError(f"{name} is {found!r:.80}, which is no function, no Tool and no ToolSet")
    return title, SingleTool(make_tool(found))


def _build(kind: type, name: str, options: Mapping[str, Any]) -> ToolSet:
    """Build a tool set, a dataclass whose fields are its options."""
    from pydantic import TypeAdapter, ValidationError

    known = {each.name: each for each in dataclasses.fields(kind) if each.init} if dataclasses.is_dataclass(kind) else {}
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for option, value in options.items():
        if option not in known:
            raise ToolConfigError(f"the tool {name} has no option {option!r}{suggest_names(option, known)}")
        try:
            values[option] = TypeAdapter(types[option]).validate_json(json.dumps(value), strict=True)
        except (ValidationError, TypeError) as error:
            why = explain_invalid(types[option], value, error)
            raise ToolConfigError(f"the option {option} of the tool {name} is {value!r:.120}: {why}") from error
    for option, each in known.items():
        if option not in values and each.default is MISSING and each.default_factory is MISSING:
            raise ToolConfigError(f"the tool {name} needs the option {option}; write {{{name}: {{{option}: ...}}}}")
    try:
        built: ToolSet = kind(**values)
    except (TypeError, ValueError) as error:
        raise ToolConfigError(f"the tool {name}: {error}") from error
    return built


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """The tools available to the policy in an episode, and limits on their use."""

    tools: Any = ()  # names, functions as file.py:function, and {NAME: {OPTION: VALUE}}
    max_tool_calls: int | None = None  # per episode; None: as many as fit
    tool_timeout_s: float = 60.0  # for one call
    parallel_tool_calls: bool = True  # whether a turn may have several calls, which run concurrently
    at_tool_limit: Literal["tell", "end"] = "tell"  # a call beyond max_tool_calls is reported to the policy, or ends the episode
    max_tool_result: int = 20_000  # characters of a result; the middle of a longer one is left out
    tool_continuation: Literal["turn", "message"] = (
        "turn"  # after a call: a tool message and a new turn, or a continuation of the same message
    )

    @cached_property
    def tool_sets(self) -> tuple[tuple[str, ToolSet], ...]:
        """The sets of tools by name. Raises ToolConfigError."""
        return make_tool_sets(self.tools)

    @property
    def has_tools(self) -> bool:
        return bool(self.tool_sets)

    def open_tools(self) -> AbstractAsyncContextManager[Toolbox]:
        limits = ToolLimits(
            max_calls=self.max_tool_calls,
            timeout_s=self.tool_timeout_s,
            parallel=self.parallel_tool_calls,
            max_result=self.max_tool_result,
            at_limit=self.at_tool_limit,
        )
        return open_toolbox(self.tool_sets, limits, self.tool_continuation)

    def check_tool_options(self) -> None:
        """Raise ToolConfigError for invalid tools and limits."""
        if self.max_tool_calls is not None and self.max_tool_calls < 1:
            raise ToolConfigError(f"max_tool_calls is {self.max_tool_calls}; set it to at least 1, or tools to [] for none")
        if self.tool_timeout_s <= 0:
            raise ToolConfigError(f"tool_timeout_s is {self.tool_timeout_s:g}; set it to seconds above 0")
        if self.max_tool_result < 100:
            raise ToolConfigError(f"max_tool_result is {self.max_tool_result}; set it to at least 100 characters")
        _ = self.tool_sets
