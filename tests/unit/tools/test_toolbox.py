"""Calls of an episode: limits, errors and what the policy is told of them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from strop.environments.base import EnvironmentConfigError
from strop.environments.handle import LocalEnvironment
from strop.environments.registry import make_environment
from strop.tools.base import InfrastructureError, ParsedReply, Tool, ToolConfigError, ToolError
from strop.tools.tool_options import SingleTool, make_tool_sets
from strop.tools.toolbox import METRICS, ToolLimits, open_toolbox
from strop.types import Message, ToolCall


def add(a: int, b: int = 0) -> int:
    """Add."""
    return a + b


def leave() -> None:
    sys.exit(3)


async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "waited"


def block(seconds: float) -> str:
    time.sleep(seconds)
    return "blocked"


def shout(length: int) -> str:
    return "a" * length + "\ud800"


def break_sandbox() -> str:
    raise InfrastructureError("the sandbox is gone")


ALL = [add, leave, wait, block, shout, break_sandbox]


def ask(
    *calls: tuple[str, dict[str, Any]], malformed: Sequence[str] = (), **limits: Any
) -> tuple[list[str] | None, dict[str, float]]:
    """Return what is told of calls in one turn, and the metrics."""

    async def run() -> tuple[tuple[Message, ...] | None, dict[str, float]]:
        metrics: dict[str, float] = dict.fromkeys(METRICS, 0.0)
        async with open_toolbox(make_tool_sets(ALL), ToolLimits(**limits), "turn") as box:
            reply = ParsedReply("", calls=tuple(ToolCall(name, given) for name, given in calls), malformed=tuple(malformed))
            return await box.answer(reply, metrics), metrics

    messages, metrics = asyncio.run(run())
    return None if messages is None else [message.content for message in messages], metrics


def test_results_and_errors_are_told_in_the_order_of_the_calls() -> None:
    told, metrics = ask(("add", {"a": 1, "b": 2}), ("ad", {}), ("add", {"a": "1"}), ("add", {"b": 1, "c": 2}), malformed=["Oh."])
    assert told is not None
    assert told[0] == "3"
    assert "there is no tool 'ad'; did you mean 'add'?" in told[1]
    assert "a is '1', which is not of type integer" in told[2]
    assert "a is missing" in told[3] and "no argument 'c'" in told[3]
    assert told[4] == "Error: Oh."
    assert metrics == {"tool_calls": 4.0, "tool_errors": 3.0, "malformed_tool_calls": 1.0}


def test_an_exit_in_a_tool_is_told_and_a_broken_sandbox_is_an_error_of_the_rollout() -> None:
    told, _ = ask(("leave", {}))
    assert told is not None and told[0].startswith("Error: leave failed")
    with pytest.raises(InfrastructureError):
        ask(("break_sandbox", {}))


def test_calls_of_a_turn_run_beside_each_other_and_plain_functions_do_not_block() -> None:
    started = time.perf_counter()
    told, _ = ask(*[("block", {"seconds": 0.2})] * 8, *[("wait", {"seconds": 0.2})] * 8)
    assert told == ["blocked"] * 8 + ["waited"] * 8
    assert time.perf_counter() - started < 1.5


def test_a_call_that_takes_too_long_is_given_up() -> None:
    started = time.perf_counter()
    told, _ = ask(("block", {"seconds": 5}), ("wait", {"seconds": 5}), timeout_s=0.2)
    assert told == ["Error: block did not answer within 0.2 s", "Error: wait did not answer within 0.2 s"]
    assert time.perf_counter() - started < 3


def test_at_the_limit_the_policy_is_told_or_the_episode_ends() -> None:
    calls = [("add", {"a": number}) for number in range(3)]
    told, metrics = ask(*calls, max_calls=2)
    assert told is not None and told[:2] == ["0", "1"] and "no calls are left: an episode has at most 2" in told[2]
    assert metrics["tool_errors"] == 1.0
    assert ask(*calls, max_calls=2, at_limit="end")[0] is None


def test_one_call_at_a_time_where_parallel_calls_are_off() -> None:
    told, _ = ask(("add", {"a": 1}), ("add", {"a": 2}), parallel=False)
    assert told is not None and told[0] == "1" and "make one call at a time" in told[1]


def test_a_long_result_loses_its_middle_and_is_text() -> None:
    told, _ = ask(("shout", {"length": 5000}), max_result=200)
    assert told is not None and len(told[0]) < 400 and "?" in told[0]


class Shelf:
    """A set with a tool that others have too."""

    def __init__(self, name: str) -> None:
        self.name, self.closed = name, False

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Sequence[Tool]]:
        yield (Tool("find", self.name, {"type": "object", "properties": {}}, lambda: self.name),)
        self.closed = True

    def open(self) -> Any:
        return self._open()


def test_names_that_meet_are_prefixed_and_sets_are_closed() -> None:
    async def run() -> None:
        left, right = Shelf("left"), Shelf("right")
        async with open_toolbox([("a", left), ("b", right), ("add", SingleTool(_add_tool()))], ToolLimits(), "turn") as box:
            assert sorted(box.tools) == ["a_find", "add", "b_find"]
            told = await box.answer(ParsedReply("", calls=(ToolCall("b_find"),)), {})
            assert told is not None and told[0].content == "right"
        assert left.closed and right.closed

    asyncio.run(run())


def _add_tool() -> Tool:
    from strop.tools.tool_options import make_tool

    return make_tool(add)


def test_tools_are_named_in_every_environment(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text('def twice(number: int) -> int:\n    """Double it."""\n    return 2 * number\n')
    environment = make_environment("arithmetic", {"tools": [f"{file}:twice"], "max_tool_calls": 3, "tool_timeout_s": 5})
    assert LocalEnvironment(environment).traits.responds and [name for name, _ in environment.tool_sets] == ["twice"]
    assert not make_environment("arithmetic", {}).has_tools


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tools": ["calculater"]}, "there is no tool 'calculater'"),
        ({"tools": [{"a": {}, "b": {}}]}, "is written {NAME: {OPTION: VALUE}}"),
        ({"tools": ["os:path"]}, "no function, no Tool and no ToolSet"),
        ({"tools": 3}, "not a list of tools"),
        ({"max_tool_calls": 0}, "max_tool_calls is 0"),
        ({"tool_timeout_s": 0}, "tool_timeout_s is 0"),
        ({"tool_continuation": "line"}, "tool_continuation"),
    ],
)
def test_a_mistake_in_the_tools_is_an_error_when_the_run_starts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=said):
        make_environment("arithmetic", options)


def test_options_of_a_function_are_refused() -> None:
    with pytest.raises(ToolConfigError, match="takes no options"):
        make_tool_sets([{"json:dumps": {"indent": 2}}])


def test_a_tool_error_is_told_in_its_own_words() -> None:
    def refuse() -> str:
        raise ToolError("come back later")

    async def run() -> str:
        async with open_toolbox(make_tool_sets([refuse]), ToolLimits(), "turn") as box:
            told = await box.answer(ParsedReply("", calls=(ToolCall("refuse"),)), {})
        assert told is not None
        return told[0].content

    assert asyncio.run(run()) == "Error: come back later"
