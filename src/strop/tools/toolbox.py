"""The open tools of one episode: calls are checked, run concurrently under limits, and answered as messages."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from strop.endings import RolloutFailed
from strop.safety.exits import contain_exits
from strop.safety.printable import shorten
from strop.tools.base import ParsedReply, Tool, ToolError, ToolSchema, ToolSet
from strop.tools.call_reading import json_types
from strop.types import Message, ToolCall
from strop.user_code import describe_error, suggest_names

Continuation = Literal["turn", "message"]
METRICS = ("tool_calls", "tool_errors", "malformed_tool_calls")


@dataclass(frozen=True, kw_only=True)
class ToolLimits:
    max_calls: int | None = None  # in an episode
    timeout_s: float = 60.0
    parallel: bool = True  # whether a turn may have several calls
    max_result: int = 20_000  # characters
    at_limit: Literal["tell", "end"] = "tell"


@dataclass(frozen=True)
class ToolOffer:
    """The tools offered to the policy in an episode. Picklable."""

    schemas: tuple[ToolSchema, ...]
    continuation: Continuation = "turn"


@dataclass
class Toolbox:
    """The tools of an open episode."""

    tools: Mapping[str, Tool]
    limits: ToolLimits
    offer: ToolOffer
    used: int = field(default=0, init=False)

    async def answer(self, reply: ParsedReply, metrics: MutableMapping[str, float]) -> tuple[Message, ...] | None:
        """Run the calls of a turn and return one message for the policy per call; None ends the episode at a limit."""
        for name in METRICS:
            metrics.setdefault(name, 0.0)
        metrics["malformed_tool_calls"] += len(reply.malformed)
        if self._over(len(reply.calls)) and self.limits.at_limit == "end":
            return None
        answers = await asyncio.gather(*(self._answer_one(call, number) for number, call in enumerate(reply.calls)))
        metrics["tool_calls"] += len(reply.calls)
        metrics["tool_errors"] += sum(failed for _, failed in answers)
        results = [
            Message("tool", text, name=call.name, tool_call_id=call.id)
            for call, (text, _) in zip(reply.calls, answers, strict=True)
        ]
        return (*results, *(Message("tool", f"Error: {why}", name="tool") for why in reply.malformed))

    def _over(self, more: int) -> bool:
        return self.limits.max_calls is not None and self.used + more > self.limits.max_calls

    async def _answer_one(self, call: ToolCall, number: int) -> tuple[str, bool]:
        """Return the message for the policy about a call, and whether the call failed."""
        try:
            if number and not self.limits.parallel:
                raise ToolError("only the first call of a turn is run; make one call at a time")
            if self._over(1):
                raise ToolError(f"no calls are left: an episode has at most {self.limits.max_calls}; answer without tools")
            self.used += 1
            text, failed = await self._run(call), False
        except ToolError as error:
            text, failed = f"Error: {error}", True
        text = text.encode(errors="replace").decode()  # tokenizers reject lone surrogates
        return shorten(text, self.limits.max_result, around="\n"), failed

    async def _run(self, call: ToolCall) -> str:
        """Return the result of a call. Raises ToolError for whatever goes wrong in it, RolloutFailed for what ends the episode."""
        if (tool := self.tools.get(call.name)) is None:
            raise ToolError(f"there is no tool {call.name!r:.80}{suggest_names(call.name[:80], self.tools)}")
        check_arguments(tool, call.arguments)
        try:
            with contain_exits():
                async with asyncio.timeout(self.limits.timeout_s):
                    if inspect.iscoroutinefunction(tool.function):
                        result = await tool.function(**call.arguments)
                    else:
                        result = await run_in_daemon_thread(partial(tool.function, **call.arguments), call.name)
                        result = await result if inspect.isawaitable(result) else result
        except (ToolError, RolloutFailed):
            raise
        except TimeoutError:
            raise ToolError(f"{call.name} did not answer within {self.limits.timeout_s:g} s") from None
        except Exception as error:
            raise ToolError(f"{call.name} failed: {describe_error(error)}") from error
        return str(result)


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
    "null": (type(None),),
}


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> None:
    """Check argument names and top-level types against the schema. Raises ToolError with all problems."""
    properties = tool.parameters.get("properties", {})
    problems = [f"{name} is missing" for name in tool.parameters.get("required", ()) if name not in arguments]
    for name, value in arguments.items():
        if name not in properties:
            if not tool.parameters.get("additionalProperties"):
                problems.append(f"there is no argument {name!r:.80}{suggest_names(name[:80], properties)}")
            continue
        types = json_types(properties[name])
        if types and not any(_has_type(value, each) for each in types):
            problems.append(f"{name} is {value!r:.80}, which is not of type {' or '.join(types)}")
        values = properties[name].get("enum")
        if isinstance(values, list) and value not in values:
            problems.append(f"{name} is {value!r:.80}, and must be one of {values}")
    if problems:
        raise ToolError(f"the arguments do not fit the schema of {tool.name}: {'; '.join(problems)}")


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(name, (object,)))


async def run_in_daemon_thread(function: Callable[[], Any], name: str) -> Any:
    """Await a plain function in its own thread: if it hangs, neither other calls nor the exit of the process are delayed."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # given up after a timeout
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        failed: BaseException | None = None
        try:
            result = context.run(function)
        except Exception as error:
            failed = error
        except BaseException as error:  # SystemExit would silently end the thread
            failed = RuntimeError(f"{type(error).__name__}: {error}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=work, daemon=True, name=f"strop-tool-{name}").start()
    return await future


current_toolbox: ContextVar[Toolbox | None] = ContextVar("strop_toolbox", default=None)


@asynccontextmanager
async def open_toolbox(
    sets: Sequence[tuple[str, ToolSet]], limits: ToolLimits, continuation: Continuation
) -> AsyncIterator[Toolbox]:
    """Open tool sets for one episode; they are in ``current_toolbox`` of its context. Colliding names are prefixed with the set's
    name.
    """
    async with AsyncExitStack() as stack:
        opened = [(name, await stack.enter_async_context(each.open())) for name, each in sets]
        count: dict[str, int] = {}
        for _, tools in opened:
            for tool in tools:
                count[tool.name] = count.get(tool.name, 0) + 1
        tools_by_name: dict[str, Tool] = {}
        for number, (name, tools) in enumerate(opened):
            for tool in tools:
                key = tool.name if count[tool.name] == 1 else f"{name}_{tool.name}"
                key = key if key not in tools_by_name else f"{name}{number}_{tool.name}"
                tools_by_name[key] = Tool(key, tool.description, tool.parameters, tool.function)
        offer = ToolOffer(tuple(tool.schema for tool in tools_by_name.values()), continuation)
        toolbox = Toolbox(tools_by_name, limits, offer)
        token = current_toolbox.set(toolbox)
        try:
            yield toolbox
        finally:
            current_toolbox.reset(token)
