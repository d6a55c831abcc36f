"""Rows of data sets of code."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib

import pytest

from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.extensions.code.code_environment import CodeEnvironment
from strop.extensions.code.problem_rows import AssertTest, CallTest, StdioTest, unpack_private_tests

MBPP = {
    "task_id": 11,
    "text": "Write a function to square a number.",
    "code": "def square(x): return x * x",
    "test_list": ["assert square(2) == 4", "assert square(3) == 9"],
    "test_setup_code": "",
    "challenge_test_list": ["assert square(-1) == 1"],
}
APPS = {"question": "Add.", "input_output": json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]})}


def compress(cases: object) -> str:
    """As LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def livecodebench(kind: str = "stdin", **more: object) -> dict[str, object]:
    case = {"input": "1 2\n", "output": "3\n", "testtype": "stdin"}
    if kind == "functional":
        case = {"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": kind}
    return {
        "question_content": "Add.",
        "starter_code": "class Solution:\n    def add(self, xs, y):" if kind == "functional" else "",
        "public_test_cases": json.dumps([case]),
        "private_test_cases": compress([case, case]),
        "metadata": json.dumps({"func_name": "add"} if kind == "functional" else {}),
        **more,
    }


def first_task(row: dict[str, object], **options: object):
    return CodeEnvironment(**options).tasks(DataSource(rows=[row]))[0]


def test_rows_of_mbpp_show_one_test_and_are_graded_by_all() -> None:
    task = first_task(MBPP)
    assert task.id == "11" and len(task.problem.tests) == 3 and isinstance(task.problem.tests[0], AssertTest)
    prompt = task.messages[-1].content
    assert MBPP["text"] in prompt and "square(2) == 4" in prompt and "square(3)" not in prompt and "def square" not in prompt
    assert "square(3) == 9" in first_task(MBPP, shown_tests=3).messages[-1].content
    assert len(first_task(MBPP, max_tests=1).problem.tests) == 1


def test_rows_of_humaneval_do_not_show_their_tests() -> None:
    row = {
        "task_id": "h",
        "prompt": 'import math\n\ndef root(x):\n    """Root."""\n',
        "entry_point": "root",
        "test": "def check(candidate):\n    assert candidate(4) == 2",
    }
    task = first_task(row)
    prompt = task.messages[-1].content
    assert prompt.count("def root") == 1 and "check" not in prompt and "candidate" not in prompt
    assert task.problem.prefix == "import math" and task.problem.entry_point == "root"


def test_rows_of_livecodebench_have_their_private_tests() -> None:
    assert first_task(livecodebench()).problem.tests == (StdioTest("1 2\n", "3\n"),) * 3
    task = first_task(livecodebench("functional"))
    assert task.problem.tests == (CallTest("add", ([1, 2], 3), ([4, 5],)),) * 3
    assert "class Solution" in task.messages[-1].content
    assert len(first_task(livecodebench(private_test_cases="[]")).problem.tests) == 1


def test_a_pickle_of_private_tests_is_read_and_never_run(tmp_path) -> None:
    assert unpack_private_tests(compress([1])) == "[1]"

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    packed = base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode()
    with pytest.raises(DataError, match="are a pickle with the instruction"):
        first_task(livecodebench(private_test_cases=packed))
    assert not (tmp_path / "made").exists()


def test_rows_of_apps_have_programs_or_functions() -> None:
    assert first_task(APPS).problem.tests == (StdioTest("1 2\n", "3\n"), StdioTest("3\n4", "7"))
    functions = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}
    assert first_task({**APPS, "input_output": json.dumps(functions)}).problem.tests == (CallTest("add", (1, 2), ([3], 3)),)


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ({"question": "q", "answer": "a"}, {}, r"columns \['answer', 'question'\] are those of no kind of code problem"),
        ({"question": "q", "input_output": "{"}, {}, "row 1 .*is no row of APPS and TACO"),
        ({"question": "q", "input_output": '{"inputs": [], "outputs": []}'}, {}, "has no tests"),
        (livecodebench("functional", metadata="{}"), {}, "func_name"),
        (livecodebench(private_test_cases="AAAA"), {}, "is no row of LiveCodeBench"),
        (
            livecodebench("functional", private_test_cases=livecodebench()["private_test_cases"]),
            {},
            "standard input and of functions",
        ),
    ],
)
def test_a_row_that_cannot_be_read_is_an_error_at_the_start(row, options, words) -> None:
    with pytest.raises(DataError, match=words):
        first_task(row, **options)


def test_functions_are_graded_in_python_alone() -> None:
    with pytest.raises(EnvironmentConfigError, match="tests of Python functions, and language is c"):
        first_task(MBPP, language="c")


@pytest.mark.parametrize(
    "options", [{"timeout_s": 0}, {"tolerance": -1}, {"max_tests": 0}, {"score": "fraction", "stop_early": True}]
)
def test_options_that_cannot_work_are_errors(options) -> None:
    with pytest.raises(EnvironmentConfigError):
        CodeEnvironment(**options)


def test_tasks_are_the_same_when_asked_again() -> None:
    tasks = CodeEnvironment().tasks(DataSource(rows=[MBPP, {**MBPP, "task_id": 12}], repeat=2))
    assert [task.id for task in tasks] == ["11", "12", "11", "12"] and tasks[1] == tasks[1]


def test_rows_of_verifiable_coding_problems() -> None:
    cases = [{"fn_name": None, "input": "1\n", "output": "2\n", "type": "stdin_stdout"}]
    for info in ({"language": "python", "test_cases": cases}, json.dumps({"test_cases": cases}), repr({"test_cases": cases})):
        task = first_task({"problem_statement": "Add one.", "verification_info": info})
        assert task.problem.tests == (StdioTest("1\n", "2\n"),) and task.question == "Add one."
    with pytest.raises(DataError, match="of programs in rust, and only those in python are read; leave the row out"):
        first_task({"prompt": "Add one.", "verification_info": {"language": "rust", "test_cases": cases}})


def test_rows_of_deepcoder_have_the_tests_of_their_sources() -> None:
    call = {"type": "function_call", "fn_name": "twice", "input": [4], "output": [8]}
    functional = {"input": "2\n3", "output": "5", "testtype": "functional"}
    for tests, found, metadata in (
        ({"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", ["4"]]}, (StdioTest("1\n", "2\n"), StdioTest("2\n3", "4")), None),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}, (CallTest("f", (1,), ([2], 2)),), None),
        ([call], (CallTest("twice", (4,), ([8], 8)),), None),
        ([functional], (CallTest("add", (2, 3), (5,)),), {"func_name": "add"}),
    ):
        row = {"problem": "Do it.", "tests": json.dumps(tests), "metadata": metadata, "starter_code": None}
        assert first_task(row).problem.tests == found


def test_challenge_tests_of_mbpp_can_be_left_out() -> None:
    assert len(first_task(MBPP).problem.tests) == 3 and len(first_task(MBPP, challenge_tests=False).problem.tests) == 2
