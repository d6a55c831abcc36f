"""The interpreter as a tool."""

from __future__ import annotations

import asyncio

import pytest

from strop.extensions.code.code_interpreter import PythonTool
from strop.extensions.code.sandbox.sandbox_pool import get_sandbox
from strop.tools.base import ParsedReply, ToolConfigError
from strop.tools.tool_options import make_tool_sets
from strop.tools.toolbox import ToolLimits, open_toolbox
from strop.types import ToolCall


def call(*codes: str, **options: float) -> list[str]:
    async def run() -> list[str]:
        async with PythonTool(**options).open() as (python,):
            return [str(await python.function(code=code)) for code in codes]

    return asyncio.run(run())


def test_variables_stay_and_the_last_value_is_shown() -> None:
    said = call("x = 3", "print('printed')\nx * 2", "def f():\n    return {'a': x}\nf()", "None", "import math; math.pi")
    assert said == ["(no output)", "printed\n6", "{'a': 3}", "(no output)", "3.141592653589793"]


def test_errors_are_short_tracebacks() -> None:
    said = call("def f(n):\n    return 1 / n\nf(0)", "f(0)", "1 +", "raise SystemExit(3)", "5")
    assert said[0].splitlines()[0].startswith("Traceback") and "return 1 / n" in said[0] and "_strop_cell" not in said[0]
    assert said[0].splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "SyntaxError" in said[2] and "SystemExit: 3" in said[3] and said[4] == "5"


def test_long_output_is_cut_in_the_middle() -> None:
    (said,) = call("print('a' * 5000 + 'b')", max_output_chars=100)
    assert said.startswith("aaa") and said.endswith("b") and "\n[... 4,901 characters ...]\n" in said and len(said) < 200


def test_after_a_limit_or_an_exit_the_interpreter_starts_again() -> None:
    said = call("x = 1", "while True: pass", "x", "import os; os._exit(0)", "1 + 1", timeout_s=1)
    assert "time limit of 1 s" in said[1] and "NameError" in said[2] and "starts again" in said[3] and said[4] == "2"


def test_forged_results_change_nothing_but_their_own() -> None:
    said = call("print('{\"value\": 1}')", "import os; os.write(1, b'[' * 9000 + b'\\n'); os._exit(0)", "2")
    assert said[0] == '{"value": 1}' and "starts again" in said[1] and said[2] == "2"


def test_an_episode_that_calls_nothing_opens_no_interpreter(monkeypatch) -> None:
    monkeypatch.setattr("strop.extensions.code.code_interpreter.get_sandbox", lambda: 1 / 0)
    assert call() == []


def test_calls_of_one_turn_run_one_after_another() -> None:
    async def run() -> list[str]:
        async with PythonTool().open() as (python,):
            return list(await asyncio.gather(*(python.function(code=f"n = globals().get('n', 0) + {i}\nn") for i in (1, 2, 3))))

    assert asyncio.run(run())[-1] == "6"
    assert get_sandbox() is get_sandbox()


def test_it_is_a_ready_tool_by_its_name_and_a_wrong_option_is_an_error() -> None:
    async def run() -> str:
        async with open_toolbox(make_tool_sets(["python", "calculator"]), ToolLimits(), "turn") as toolbox:
            calls = (ToolCall("python", {"code": "x = 6\nx * 7"}), ToolCall("calculator", {"expression": "1/4 + 1/4"}))
            return " ".join(message.content for message in await toolbox.answer(ParsedReply("", calls=calls), {}) or ())

    assert asyncio.run(run()) == "42 0.5"
    with pytest.raises(ToolConfigError, match="did you mean 'timeout_s'"):
        make_tool_sets([{"python": {"timeout": 3}}])
