"""Programs graded by tests in the sandbox.

A test's expected results never enter a process in which a policy's program runs, and a verdict is never taken from one:

- stdin/stdout: the program writes, and its output is compared here.
- calls: the program's process (``programs/candidate.py``) says what each call returned, as JSON, and it is compared here.
- assertions: they run in a process of their own (``programs/checker.py``), to which the program's answers come as JSON. Checker and program
  take turns until every call of the assertions has its answer.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from strop.extensions.code.problem_rows import AssertTest, CallTest, CodeProblem, StdioTest
from strop.extensions.code.programs.plain_values import encode_value
from strop.extensions.code.sandbox.base import ExitReason, Limits, Program, ProgramRunner, RunResult

_NUMBER = re.compile(r"[+-]?(?:\d{1,64}(?:\.\d{0,64})?|\.\d{1,64})(?:[eE][+-]?\d{1,3})?")


def same_output(found: str, expected: str, tolerance: float = 0.0) -> bool:
    """Compare two texts by lines and tokens: white space around lines and between tokens does not count, blank lines at the end neither.

    Numbers are equal as numbers (2 and 2.0), within ``tolerance``, relative or absolute.
    """
    first, second = found.strip().splitlines(), expected.strip().splitlines()
    return len(first) == len(second) and all(_same_line(a, b, tolerance) for a, b in zip(first, second, strict=True))


def _same_line(found: str, expected: str, tolerance: float) -> bool:
    first, second = found.split(), expected.split()
    return len(first) == len(second) and all(a == b or _same_number(a, b, tolerance) for a, b in zip(first, second, strict=True))


def _same_number(found: str, expected: str, tolerance: float) -> bool:
    if not (_NUMBER.fullmatch(found) and _NUMBER.fullmatch(expected)):
        return False
    first, second = Decimal(found), Decimal(expected)
    return first == second or _is_close(_to_float(first), _to_float(second), tolerance)


def _is_close(found: float, expected: float, tolerance: float) -> bool:
    return tolerance > 0 and abs(found - expected) <= tolerance * max(1.0, abs(expected))


def _to_float(number: float | Decimal) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer above all floats
        return math.inf


def same_value(found: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Compare JSON of ``encode_value``, which a hostile program wrote, with a value of JSON. Tuples equal lists, as in LiveCodeBench."""
    if isinstance(found, dict) and list(found) == ["tuple"]:
        found = found["tuple"]
    if isinstance(expected, list):
        same_length = isinstance(found, list) and len(found) == len(expected)
        return same_length and all(same_value(a, b, tolerance) for a, b in zip(found, expected, strict=True))
    if isinstance(expected, dict):
        return _same_mapping(found, expected, tolerance)
    if isinstance(expected, str) or expected is None:
        return type(found) is type(expected) and bool(found == expected)
    if isinstance(found, dict) and list(found) == ["int"]:
        return isinstance(expected, int) and found["int"] == hex(expected)
    if not isinstance(found, bool | int | float):
        return False
    return bool(found == expected) or _is_close(_to_float(found), _to_float(expected), tolerance)


def _same_mapping(found: Any, expected: dict[str, Any], tolerance: float) -> bool:
    items = found.get("dict") if isinstance(found, dict) else None
    if not isinstance(items, list) or not all(isinstance(item, list) and len(item) == 2 for item in items):
        return False
    values = {key: value for key, value in items if isinstance(key, str)}
    return len(items) == len(values) == len(expected) and all(
        key in values and same_value(values[key], expected[key], tolerance) for key in expected
    )


AT_ONCE = 4  # tests of one program; the sandbox bounds all of them together
MOST_ROUNDS = 20  # of checker and program, until each call of the assertions has its answer
CHECKER = Limits(cpu_s=10, wall_s=30, memory_mb=512, output_kb=8192)
COMPILER = Limits(cpu_s=20, wall_s=60, memory_mb=1024, output_kb=16384, file_mb=64, disk_mb=128)
COMPILE = {  # once for all tests: the program comes back as text
    "c": "gcc -x c -std=gnu11 -O2 -o run program -lm && base64 -w0 run",
    "cpp": "g++ -x c++ -std=gnu++17 -O2 -o run program && base64 -w0 run",
}
RUN_COMPILED = "base64 -d program > run && rm program && chmod +x run && exec ./run"
SYNTAX_ERRORS = ("SyntaxError:", "IndentationError:", "TabError:")


class CodeTestError(Exception):
    """The tests of a problem cannot judge any program: a fault of the data, not of the reply. The message says what to do."""


@dataclass(frozen=True, kw_only=True)
class CodeGrade:
    """What the tests say of a program."""

    passed: int
    total: int  # tests that ran
    compiled: bool = True
    timeouts: int = 0
    errors: int = 0  # tests in which the program failed by itself
    run_time_s: float = 0.0  # processor time
    messages: tuple[str, ...] = field(default=(), compare=False)  # of the first failures

    @property
    def correct(self) -> bool:
        return 0 < self.total == self.passed

    @property
    def fraction(self) -> float:
        return self.passed / self.total if self.total else 0.0


@dataclass(frozen=True, kw_only=True)
class GradingRules:
    limits: Limits
    total_s: float = 30.0  # processor seconds of all function tests of a program together
    tolerance: float = 0.0
    stop_early: bool = False  # at the first failure


async def grade_code(sandbox: ProgramRunner, problem: CodeProblem, code: str, language: str, rules: GradingRules) -> CodeGrade:
    """Run the tests of a problem on a program. Raises CodeTestError, SandboxError."""
    if not code.strip():
        return CodeGrade(passed=0, total=len(problem.tests), compiled=False, messages=("the reply has no program",))
    if isinstance(problem.tests[0], StdioTest):
        return await _grade_stdio(sandbox, problem, code, language, rules)
    if isinstance(problem.tests[0], CallTest):
        return await _grade_calls(sandbox, problem, code, rules)
    return await _grade_asserts(sandbox, problem, code, rules)


async def _grade_stdio(sandbox: ProgramRunner, problem: CodeProblem, code: str, language: str, rules: GradingRules) -> CodeGrade:
    tests = [test for test in problem.tests if isinstance(test, StdioTest)]
    program = Program(source=f"{problem.prefix}\n{code}" if problem.prefix else code, language=language, limits=rules.limits)
    if language in COMPILE and len(tests) > 1:
        compiled = await sandbox.run(Program(source=COMPILE[language], language="bash", files={"program": code}, limits=COMPILER))
        if compiled.succeeded:  # if not, the first run says why: the program, or a compiler that is missing
            program = replace(program, source=RUN_COMPILED, language="bash", files={"program": compiled.stdout})

    async def run(test: StdioTest) -> tuple[RunResult, bool]:
        kilobytes = max(rules.limits.output_kb, 2 * len(test.expected) // 1024 + 1)
        limits = replace(rules.limits, output_kb=kilobytes)
        result = await sandbox.run(replace(program, stdin=test.stdin, limits=limits))
        same = result.succeeded and await asyncio.to_thread(same_output, result.stdout, test.expected, rules.tolerance)
        return result, same

    done: list[tuple[RunResult, bool]] = [await run(tests[0])]  # alone: a program that does not compile needs no second one
    while (
        len(done) < len(tests) and not _does_not_compile(done[0][0]) and not (rules.stop_early and not all(ok for _, ok in done))
    ):
        done += await asyncio.gather(*(run(test) for test in tests[len(done) : len(done) + AT_ONCE]))
    failed = [result for result, ok in done if not ok]
    return CodeGrade(
        passed=sum(ok for _, ok in done),
        total=len(tests),
        compiled=not _does_not_compile(done[0][0]),
        timeouts=sum(result.reason == ExitReason.TIME for result in failed),
        errors=sum(result.reason != ExitReason.TIME and not result.succeeded for result in failed),
        run_time_s=sum(result.cpu_s for result, _ in done),
        messages=tuple(_describe(result) for result in failed[:3]),
    )


def _does_not_compile(result: RunResult) -> bool:
    last = result.stderr.rstrip().rpartition("\n")[2]
    return result.reason == ExitReason.COMPILE or (not result.succeeded and last.startswith(SYNTAX_ERRORS))


def _describe(result: RunResult) -> str:
    if result.succeeded:
        return f"wrong output {result.stdout[:200]!r}"
    return f"{result.reason} {result.exit_code}: {result.stderr[-500:]}"


@dataclass(frozen=True)
class _Answers:
    """What a program said of its calls: a line of JSON each, by call. None of it is to be believed."""

    loaded: bool
    compiled: bool
    lines: Mapping[str, str]
    run: RunResult
    message: str = ""


async def _ask(
    sandbox: ProgramRunner, problem: CodeProblem, code: str, calls: Sequence[Mapping[str, Any]], rules: GradingRules
) -> _Answers:
    seconds = min(rules.total_s, rules.limits.cpu_s * max(1, len(calls)))
    limits = replace(
        rules.limits,
        cpu_s=seconds + 1,
        wall_s=seconds + rules.limits.wall_s,
        output_kb=max(1024, rules.limits.output_kb),
    )
    sources = [*_definitions(problem.setup), *([problem.prefix] if problem.prefix else []), code]
    request = {"sources": sources, "calls": list(calls), "timeout_s": rules.limits.cpu_s}
    result = await sandbox.run(Program(source=read_program("candidate"), stdin=json.dumps(request), limits=limits))
    first, *lines = result.stdout.split("\n") if result.stdout else [""]
    said = parse_line(first)
    raised = said.get("raised") if isinstance(said, dict) else None
    kind = str(raised[0]) if isinstance(raised, list) and raised else ""
    return _Answers(
        loaded=isinstance(said, dict) and "value" in said,
        compiled=kind != "SyntaxError",
        lines={call["id"]: line for call, line in zip(calls, lines, strict=False) if line},
        run=result,
        message=f"{raised[0]}: {raised[1]}"[:500] if isinstance(raised, list) and len(raised) == 2 else "",
    )


async def _grade_calls(sandbox: ProgramRunner, problem: CodeProblem, code: str, rules: GradingRules) -> CodeGrade:
    tests = [test for test in problem.tests if isinstance(test, CallTest)]
    calls: list[dict[str, Any]] = [
        {
            "id": f"{index}",
            "kind": "call",
            "target": test.function,
            "args": [_encode(each) for each in test.arguments],
            "kwargs": {},
        }
        for index, test in enumerate(tests)
    ]
    answers = await _ask(sandbox, problem, code, calls, rules)
    read = [parse_line(answers.lines.get(call["id"], "")) for call in calls]
    values = [answer["value"] if isinstance(answer, dict) and "value" in answer else _NOTHING for answer in read]
    passed = [
        value is not _NOTHING and any(same_value(value, each, rules.tolerance) for each in test.accepted)
        for value, test in zip(values, tests, strict=True)
    ]
    unanswered = len(calls) - len(answers.lines)
    timeouts = sum(isinstance(answer, dict) and "timeout" in answer for answer in read)
    late = bool(timeouts) or answers.run.reason == ExitReason.TIME
    wrong = next((f"call {index} returned {read[index]!r:.300}" for index, ok in enumerate(passed) if not ok), "")
    return CodeGrade(
        passed=sum(passed),
        total=len(tests),
        compiled=answers.compiled,
        timeouts=timeouts + (unanswered if late else 0),
        errors=sum(value is _NOTHING for value in values) - timeouts - (unanswered if late else 0),
        run_time_s=answers.run.cpu_s,
        messages=tuple(each for each in (answers.message, wrong) if each),
    )


_NOTHING = object()


def _encode(value: Any) -> Any:
    return encode_value(value, lambda inner: str(inner))


def parse_line(line: str) -> Any:
    """Return the JSON of a line, or None where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


async def _grade_asserts(sandbox: ProgramRunner, problem: CodeProblem, code: str, rules: GradingRules) -> CodeGrade:
    tests = [test.source for test in problem.tests if isinstance(test, AssertTest)]
    verdict = await _check(sandbox, problem, tests, {})
    if verdict is None or verdict.get("ungradable") or not verdict["calls"]:
        why = "they fail by themselves" if verdict is None else verdict.get("ungradable") or "they call nothing"
        raise CodeTestError(
            f"the tests cannot run separately from the program: {why}. They may hand a program plain data (numbers, texts, lists, dicts, "
            "...) and objects of its own classes; change the row, or leave it out"
        )
    seconds, answers = 0.0, _Answers(False, True, {}, RunResult(reason=ExitReason.EXIT, exit_code=0))
    asked: list[str] = []
    for _ in range(MOST_ROUNDS):
        calls = verdict["calls"]
        if [call["id"] for call in calls] == asked:
            break
        asked = [call["id"] for call in calls]
        answers = await _ask(sandbox, problem, code, calls, rules)
        seconds += answers.run.cpu_s
        if not answers.loaded or seconds > rules.total_s:
            break
        lines = dict.fromkeys(asked, "") | dict(answers.lines)
        verdict = await _check(sandbox, problem, tests, lines)
        if verdict is None:  # the answers break the assertions: too much memory, too long
            break
    settled = (
        verdict is not None and [call["id"] for call in verdict["calls"]] == asked and answers.loaded and not verdict["waiting"]
    )
    total = max(len(tests), verdict["passed"] + verdict["failed"] if verdict else 0)
    said = [parse_line(answers.lines.get(name, "")) for name in asked]
    late = answers.run.reason == ExitReason.TIME or any(isinstance(answer, dict) and "timeout" in answer for answer in said)
    raised = not answers.loaded or any(isinstance(answer, dict) and "raised" in answer for answer in said)
    return CodeGrade(
        passed=verdict["passed"] if settled and verdict else 0,
        total=total,
        compiled=answers.compiled,
        timeouts=int(late),
        errors=int(raised and not late),
        run_time_s=seconds,
        messages=tuple(verdict["messages"]) if settled and verdict else (answers.message or _describe(answers.run),),
    )


async def _check(
    sandbox: ProgramRunner, problem: CodeProblem, tests: Sequence[str], answers: Mapping[str, str]
) -> dict[str, Any] | None:
    """Return what a pass over the tests found, or None where it did not end well."""
    remote = [problem.entry_point] if problem.entry_point else []
    request = {"setup": list(problem.setup), "tests": list(tests), "remote": remote, "answers": dict(answers)}
    result = await sandbox.run(Program(source=read_program("checker"), stdin=json.dumps(request), limits=CHECKER))
    verdict = parse_line(result.stdout) if result.succeeded else None
    return verdict if isinstance(verdict, dict) and ("calls" in verdict or not answers) else None


def _definitions(setup: Sequence[str]) -> Iterator[str]:
    """The imports, functions and classes of the tests' setup, which a program may use, too."""
    for source in setup:
        kept = [
            node
            for node in ast.parse(source).body
            if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)
        ]
        yield ast.unparse(ast.Module(body=list(kept), type_ignores=[]))


PARTS = {"candidate": ("plain_values",), "checker": ("plain_values",)}  # of the programs for the sandbox


@cache
def read_program(name: str) -> str:
    """Return a program for the sandbox as one text: imports from Strop are replaced by what they import."""
    folder = Path(__file__).with_name("programs")
    parts = [(folder / f"{part}.py").read_text(encoding="utf-8") for part in (*PARTS[name], name)]
    lines = [line for part in parts for line in part.splitlines() if not line.startswith(("from strop.", "from __future__"))]
    return "\n".join(["from __future__ import annotations", *lines, "main()", ""])
