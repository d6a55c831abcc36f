"""The tool options of every environment."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from strop.tools.base import ToolConfigError, ToolSet
from strop.tools.tool_registry import make_tool_sets
from strop.tools.toolbox import Toolbox, ToolLimits, open_toolbox


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
