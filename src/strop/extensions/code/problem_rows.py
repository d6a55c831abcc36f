"""Rows of code data sets as problems. The columns say which kind a row is of."""

from __future__ import annotations

import ast
import base64
import json
import pickletools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strop.data.sources.records import DataError
from strop.environments.base import PromptedTask


@dataclass(frozen=True)
class StdioTest:
    """A program reads ``stdin`` and must write ``expected``."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """A call of a function, or of a method of the class ``Solution``, must return one of the ``accepted`` values (of JSON)."""

    function: str
    arguments: tuple[Any, ...]
    accepted: tuple[Any, ...]


@dataclass(frozen=True)
class AssertTest:
    """Python statements that assert something of the program."""

    source: str


Test = StdioTest | CallTest | AssertTest


@dataclass(frozen=True, kw_only=True)
class CodeProblem:
    """A problem, in the form that every kind of row is read into."""

    question: str
    tests: tuple[Test, ...]  # all of one kind
    starter: str = ""  # code that the program begins with, or that names its function
    prefix: str = ""  # Python that a reply may rely on: it runs before the reply's program
    setup: tuple[str, ...] = ()  # Python that the tests of an AssertTest rely on
    shown: tuple[str, ...] = ()  # assertions that a prompt may show; empty: those of its tests
    entry_point: str = ""  # the function that the tests call; empty: every name that they do not define


@dataclass(frozen=True, kw_only=True)
class CodeTask(PromptedTask):
    problem: CodeProblem


LARGEST_TESTS = 1 << 29  # bytes of LiveCodeBench's private tests, unpacked
TEXT_OPCODES = {
    "PROTO",
    "FRAME",
    "MEMOIZE",
    "BINPUT",
    "LONG_BINPUT",
    "PUT",
    "STOP",
}  # of a pickle, in addition to that of its text
CALL_KINDS = ("functional", "function_call")  # of tests; others are of standard input
UNICODE_OPCODES = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}


@dataclass(frozen=True)
class RowShape:
    """A kind of rows, known by columns that no other kind has."""

    name: str
    columns: tuple[str, ...]  # that it must have
    question: tuple[str, ...]  # the first of these is the question
    read: Callable[[Mapping[str, Any], str], CodeProblem]


def _read_humaneval(row: Mapping[str, Any], question: str) -> CodeProblem:
    prompt, entry = str(row["prompt"]), str(row["entry_point"])
    return CodeProblem(
        question=prompt,
        starter=prompt,
        prefix=keep_helpers(prompt, entry),
        setup=(keep_helpers(prompt, entry),),
        tests=(AssertTest(f"{row['test']}\ncheck({entry})"),),
        entry_point=entry,
    )


def keep_helpers(prompt: str, entry: str) -> str:
    """Return the imports and helpers of a prompt without the function that is to be written."""
    tree = ast.parse(prompt)
    tree.body = [node for node in tree.body if getattr(node, "name", "") != entry]
    return ast.unparse(tree)


def _read_mbpp(row: Mapping[str, Any], question: str) -> CodeProblem:
    asserts = [*row["test_list"], *(row.get("challenge_test_list") or ())]
    return CodeProblem(
        question=question,
        tests=tuple(AssertTest(str(source)) for source in asserts),
        setup=_read_setup(row),
    )


def _read_setup(row: Mapping[str, Any]) -> tuple[str, ...]:
    setup = [str(row.get("test_setup_code") or ""), "\n".join(row.get("test_imports") or ())]
    return tuple(source for source in setup if source.strip())


def _read_mbpp_plus(row: Mapping[str, Any], question: str) -> CodeProblem:
    """Return a problem whose tests are a loop over many inputs, and of which a prompt shows MBPP's."""
    shown = tuple(str(source) for source in row["test_list"])
    return CodeProblem(question=question, tests=(AssertTest(str(row["test"])),), setup=_read_setup(row), shown=shown)


def _read_livecodebench(row: Mapping[str, Any], question: str) -> CodeProblem:
    cases = [*_list_cases(row["public_test_cases"]), *_list_cases(row.get("private_test_cases") or "[]")]
    return _read_cases(row, question, cases)


def _read_cases(row: Mapping[str, Any], question: str, cases: Sequence[Mapping[str, Any]]) -> CodeProblem:
    """Return a problem of test cases that say of which kind they are, and perhaps which function they call."""
    metadata = row.get("metadata") or "{}"
    named = (json.loads(metadata) if isinstance(metadata, str) else metadata).get("func_name") or ""
    tests: list[Test] = []
    for case in cases:
        function = case.get("fn_name") or named
        if (case.get("testtype") or case.get("type") or "stdin") not in CALL_KINDS:
            tests.append(StdioTest(_join_lines(case["input"]), _join_lines(case["output"])))
        elif not function:
            raise DataError("a functional test needs func_name in the column 'metadata'")
        elif isinstance(case["input"], str):  # JSON, a line for each argument
            arguments = tuple(json.loads(line) for line in case["input"].split("\n") if line.strip())
            tests.append(CallTest(function, arguments, (json.loads(case["output"]),)))
        else:
            tests.append(_make_call(function, case["input"], case["output"]))
    return CodeProblem(question=question, tests=tuple(tests), starter=str(row.get("starter_code") or ""), prefix=COMMON_IMPORTS)


def _list_cases(written: Any) -> list[Any]:
    """Return test cases: a list, or one as JSON, or compressed as LiveCodeBench's private ones are."""
    if not isinstance(written, str):
        return list(written)
    cases = json.loads(written if written.lstrip().startswith("[") else unpack_private_tests(written))
    return list(cases)


def unpack_private_tests(text: str) -> str:
    """Return the JSON inside LiveCodeBench's private tests: base64 of zlib of a pickle of one text.

    The pickle is read as a list of instructions and never run: one that holds anything but a text is refused. Raises DataError.
    """
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), LARGEST_TESTS)
    if unpacker.unconsumed_tail:
        raise DataError(f"private_test_cases unpack to more than {LARGEST_TESTS >> 20} MiB; leave the row out")
    texts: list[str] = []
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in UNICODE_OPCODES:
            texts.append(str(argument))
        elif opcode.name not in TEXT_OPCODES:
            raise DataError(
                f"private_test_cases are a pickle with the instruction {opcode.name}, where LiveCodeBench has only a text. It is not run, "
                "since a pickle can run programs; write the tests as JSON"
            )
    if len(texts) != 1:
        raise DataError(
            f"private_test_cases are a pickle of {len(texts)} texts, where LiveCodeBench has one; write the tests as JSON"
        )
    return texts[0]


def _read_apps(row: Mapping[str, Any], question: str) -> CodeProblem:
    given = row["input_output"]
    return _read_pairs(row, question, json.loads(given) if isinstance(given, str) else given)


def _read_pairs(row: Mapping[str, Any], question: str, cases: Mapping[str, Any]) -> CodeProblem:
    """Return a problem of a list of inputs and one of outputs."""
    function = cases.get("fn_name")
    pairs = list(zip(cases["inputs"], cases["outputs"], strict=True))
    tests: tuple[Test, ...] = tuple(StdioTest(_join_lines(given), _join_lines(expected)) for given, expected in pairs)
    if function:
        tests = tuple(_make_call(function, given, expected) for given, expected in pairs)
    return CodeProblem(question=question, tests=tests, starter=str(row.get("starter_code") or ""), prefix=COMMON_IMPORTS)


def _make_call(function: str, given: Sequence[Any], expected: Any) -> CallTest:
    """Return the test of a call; an expected result may stand in its own list."""
    return CallTest(function, tuple(given), (expected, expected[0]) if _is_wrapped(expected) else (expected,))


def _read_deepcoder(row: Mapping[str, Any], question: str) -> CodeProblem:
    """Return a problem of DeepCoder, whose tests are as TACO's, LiveCodeBench's or PrimeIntellect's."""
    tests = json.loads(row["tests"]) if isinstance(row["tests"], str) else row["tests"]
    return _read_pairs(row, question, tests) if isinstance(tests, Mapping) else _read_cases(row, question, tests)


def _read_verifiable(row: Mapping[str, Any], question: str) -> CodeProblem:
    info = row["verification_info"]
    info = _parse_literal(info) if isinstance(info, str) else info
    if (language := info.get("language") or "python") != "python":
        raise DataError(f"its tests are of programs in {language}, and only those in python are read; leave the row out")
    return _read_cases({}, question, info["test_cases"])


def _parse_literal(text: str) -> Any:
    """Return the value of a text of JSON, or of Python."""
    try:
        return json.loads(text)
    except ValueError:
        return ast.literal_eval(text)


def _join_lines(value: Any) -> str:
    return "\n".join(str(line) for line in value) if isinstance(value, list) else str(value)


def _is_wrapped(expected: Any) -> bool:
    return isinstance(expected, list) and len(expected) == 1


# What the sets' own graders import before a program.
COMMON_IMPORTS = "\n".join(
    [
        "import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random, re, string, sys",
        "from bisect import *",
        "from collections import *",
        "from functools import *",
        "from heapq import *",
        "from itertools import *",
        "from math import *",
        "from typing import *",
    ]
)

SHAPES = (
    RowShape("HumanEval", ("entry_point", "test", "prompt"), ("prompt",), _read_humaneval),
    RowShape("LiveCodeBench", ("question_content", "public_test_cases"), ("question_content",), _read_livecodebench),
    RowShape("APPS and TACO", ("input_output",), ("question", "problem", "prompt"), _read_apps),
    RowShape("MBPP+", ("test_list", "test"), ("prompt", "text"), _read_mbpp_plus),
    RowShape("MBPP", ("test_list",), ("text", "prompt"), _read_mbpp),
    RowShape("verifiable coding problems", ("verification_info",), ("problem_statement", "prompt"), _read_verifiable),
    RowShape("DeepCoder", ("tests",), ("problem",), _read_deepcoder),
)


def find_shape(row: Mapping[str, Any]) -> RowShape:
    """Return the kind of a row. Raises DataError where its columns are those of no kind."""
    for shape in SHAPES:
        if all(column in row for column in shape.columns) and any(column in row for column in shape.question):
            return shape
    kinds = "; ".join(f"{shape.name}: {', '.join(shape.columns)} and {' or '.join(shape.question)}" for shape in SHAPES)
    raise DataError(
        f"the columns {sorted(row)} are those of no kind of code problem. Name the columns as one of these has them: {kinds}"
    )


def read_problem(shape: RowShape, row: Mapping[str, Any], where: str, *, max_tests: int | None = None) -> CodeProblem:
    """Return the problem of a row. Raises DataError, which says where it stands."""
    try:
        question = next(str(row[column]) for column in shape.question if column in row)
        problem = shape.read(row, question)
    except (DataError, ValueError, TypeError, KeyError, AttributeError, SyntaxError, zlib.error) as error:
        raise DataError(f"{where} is no row of {shape.name}: {type(error).__name__} {error}") from error
    if not problem.tests:
        raise DataError(f"{where} has no tests; leave it out")
    if len({type(test) for test in problem.tests}) > 1:
        raise DataError(f"{where} has tests of standard input and of functions; split it into two rows")
    return replace(problem, tests=problem.tests[:max_tests])
