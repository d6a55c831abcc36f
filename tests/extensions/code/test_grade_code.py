"""Programs graded by their tests."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from strop.environments.compute_rewards import compute_rewards
from strop.extensions.code.code_environment import CodeEnvironment
from strop.extensions.code.grade_code import CodeGrade, CodeTestError, GradingRules, grade_code
from strop.extensions.code.problem_rows import AssertTest, CallTest, CodeProblem, CodeTask, StdioTest
from strop.extensions.code.sandbox.base import Limits
from strop.extensions.code.sandbox.sandbox_pool import get_sandbox
from support.sweep import sweep

RULES = GradingRules(limits=Limits(cpu_s=1, wall_s=5))
IMPATIENT = GradingRules(limits=Limits(cpu_s=0.3, wall_s=5))  # for programs that do not end
SUMS = CodeProblem(
    question="Add.", tests=tuple(StdioTest(f"{a} {b}\n", f"{a + b}\n") for a, b in ((1, 2), (3, 4), (5, 6), (-1, 1)))
)


def grade(problem: CodeProblem, code: str, language: str = "python", rules: GradingRules = RULES) -> CodeGrade:
    return asyncio.run(grade_code(get_sandbox(), problem, code, language, rules))


def asserts(*sources: str, **options) -> CodeProblem:
    return CodeProblem(question="", tests=tuple(AssertTest(source) for source in sources), **options)


PROGRAMS = {
    "python": "a, b = map(int, input().split())\nprint(a + b)",
    "bash": "read a b; echo $((a + b))",
    "c": '#include <stdio.h>\nint main() { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); }',
    "cpp": "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }",
    "javascript": "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number); console.log(a + b)",
}


@pytest.mark.parametrize("language", PROGRAMS)
def test_programs_of_each_language_read_and_write(language: str) -> None:
    tool = {"javascript": "node", "c": "gcc", "cpp": "g++"}.get(language)
    if tool and not shutil.which(tool):
        pytest.skip(f"{tool} is not installed")
    assert grade(SUMS, PROGRAMS[language], language).correct


def test_credit_is_partial_and_failures_are_counted() -> None:
    found = grade(
        SUMS, "a, b = map(int, input().split())\nif a < 0: raise ValueError\nwhile a == 5: pass\nprint(3)", rules=IMPATIENT
    )
    assert (found.passed, found.total, found.timeouts, found.errors, found.compiled) == (1, 4, 1, 1, True)
    assert "ValueError" in " ".join(found.messages)


def test_a_program_that_does_not_compile_runs_once() -> None:
    found = grade(SUMS, "print(1")
    assert (found.passed, found.compiled, found.fraction) == (0, False, 0.0)
    if shutil.which("gcc"):
        assert not grade(SUMS, "int main( {", "c").compiled
    assert not grade(SUMS, "  \n").compiled


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
def test_a_compiled_program_is_compiled_once_and_keeps_its_limits() -> None:
    compiled = []

    class Counting:
        async def run(self, program):
            compiled.append("gcc" in program.source or program.language == "c")
            return await get_sandbox().run(program)

    code = (
        PROGRAMS["c"]
        .replace("printf", "if (a == 3) *(volatile int *)0 = 1; while (a == 5) b++; printf")
        .replace("int a, b", "volatile int a, b")
    )
    rules = GradingRules(limits=Limits(cpu_s=0.5, wall_s=5))
    found = asyncio.run(grade_code(Counting(), SUMS, code, "c", rules))  # type: ignore[arg-type]
    assert (found.passed, found.timeouts, found.errors) == (2, 1, 1) and sum(compiled) == 1


def test_grading_can_stop_at_the_first_failure() -> None:
    class Counting:
        runs = 0

        async def run(self, program):
            self.runs += 1
            return await get_sandbox().run(program)

    sandbox = Counting()
    rules = GradingRules(limits=RULES.limits, stop_early=True)
    assert not asyncio.run(grade_code(sandbox, SUMS, "print(0)", "python", rules)).correct  # type: ignore[arg-type]
    assert sandbox.runs == 1


def test_functions_and_methods_of_solution_are_called() -> None:
    problem = CodeProblem(question="", tests=(CallTest("add", ([1], 2), ([3],)), CallTest("add", ([], 0), ([],))))
    assert grade(problem, "def add(xs, y): return [x + y for x in xs]").correct
    assert grade(problem, "class Solution:\n    def add(self, xs, y): return tuple(x + y for x in xs)").correct
    slow = grade(problem, "def add(xs, y):\n    while not xs: pass\n    return [x + y for x in xs]", rules=IMPATIENT)
    assert (slow.passed, slow.timeouts, slow.errors) == (1, 1, 0)
    broken = grade(problem, "def add(xs, y): return xs[0] + y")
    assert (broken.passed, broken.timeouts, broken.errors) == (0, 0, 1)
    assert not grade(problem, "def add(xs, y) return").compiled


def test_assertions_see_objects_of_the_program_and_keep_their_order() -> None:
    problem = asserts(
        "box = Box(3)\nbox.add(4)\nbox.add(5)\nassert box.total() == 12\nassert box.total() + Box(1).total() == 13",
        "root = Node(1)\nroot.left = Node(2)\nassert depth(root) == 2 and root.left.value == 2",
        "assert pick(max, 1) == 1" if False else "assert pick([Node(5), Node(6)]) == [5, 6]",
        setup=("class Node:\n    def __init__(self, value):\n        self.value, self.left = value, None",),
    )
    code = (
        "class Box:\n    def __init__(self, n): self.n = n\n    def add(self, n): self.n += n\n    def total(self): return self.n\n"
        "def depth(node): return 0 if node is None else 1 + depth(node.left)\n"
        "def pick(nodes): return [node.value for node in nodes]"
    )
    found = grade(problem, code)
    assert found.correct and found.total == 4
    assert grade(problem, code.replace("self.n += n", "pass")).passed == 2


def test_exceptions_of_the_program_reach_the_assertions() -> None:
    problem = asserts(
        "try:\n    f(-1)\n    raised = False\nexcept ValueError:\n    raised = True\nassert raised", "assert f(1) == 1"
    )
    assert grade(problem, "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x").correct
    assert grade(problem, "def f(x): return x").passed == 1


def test_a_call_that_takes_too_long_fails_its_assertions_alone() -> None:
    problem = asserts("assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3")
    found = grade(problem, "def f(x):\n    while x == 3: pass\n    return x", rules=IMPATIENT)
    assert (found.passed, found.total, found.timeouts) == (2, 3, 1)


def test_helpers_of_the_prompt_are_not_the_programs() -> None:
    setup = "def encode(x): return x[::-1]"
    problem = asserts("assert decode(encode('abc')) == 'abc'", setup=(setup,), prefix=setup, entry_point="decode")
    assert grade(problem, "def decode(x): return x[::-1]").correct
    assert not grade(problem, "def encode(x): return x\ndef decode(x): return x").correct


@pytest.mark.parametrize(
    "source", ["assert f(lambda x: x) == 1", "assert 1 == 1", "assert f(", "import no_such_module\nassert f(1) == 1"]
)
def test_assertions_that_can_judge_no_program_are_errors(source: str) -> None:
    with pytest.raises(CodeTestError, match="cannot run separately from the program"):
        grade(asserts(source), "def f(x): return x")


def test_the_environment_logs_each_part_of_a_grade(wrote) -> None:
    task = CodeTask(id="sum", problem=SUMS, messages=())
    reply = "```python\na, b = map(int, input().split())\nprint(a + b if a < 5 else 0)\n```"
    for score, reward in (("all", 0.0), ("fraction", 0.75)):
        rollout = wrote(task, reply)
        result = asyncio.run(compute_rewards(CodeEnvironment(score=score), task, rollout))
        assert result.reward == reward
        assert dict(result.rewards) == {"test_score": reward, "correct": 0.0, "passed": 0.75, "compiles": 1.0}
        assert set(rollout.metrics) == {"timeouts", "program_errors", "run_time_s"} and rollout.metrics["timeouts"] == 0


def test_a_rollout_is_graded_once(wrote, monkeypatch) -> None:
    runs = []

    class Counting:
        async def run(self, program):
            runs.append(program)
            return await get_sandbox().run(program)

    monkeypatch.setattr("strop.extensions.code.code_environment.get_sandbox", Counting)
    task = CodeTask(id="sum", problem=SUMS, messages=())
    asyncio.run(compute_rewards(CodeEnvironment(), task, wrote(task, "```python\nprint(3)\n```")))
    assert len(runs) == len(SUMS.tests)


CLOSE = """
import numpy as np

def assertion(out, exp, atol):
    exact = out == exp
    if not exact and atol != 0:
        {compare}
    else:
        assert exact

def check(candidate):
    for inp, exp in zip({inputs}, {results}):
        assertion(candidate(*inp), exp, 1e-6)

check(third)
"""


@pytest.mark.parametrize(
    "compare",
    sweep(
        ["assert np.allclose(out, exp, rtol=1e-07, atol=atol)", "np.testing.assert_allclose(out, exp, atol=atol)"],
        "np.testing.assert_allclose(out, exp, atol=atol)",
    ),
)
def test_calls_of_a_helper_that_asserts_count_and_numbers_may_be_close(compare: str) -> None:
    inputs, results = [[[1.0, 2.0]], [[]], [[3.0]]], [[1 / 3, 2 / 3], [], [1.0]]
    problem = asserts(CLOSE.format(compare=compare, inputs=inputs, results=results), entry_point="third")
    found = grade(problem, "def third(xs): return [x * 0.3333333333333 for x in xs]")
    assert (found.passed, found.total) == (3, 3) and found.correct
    for wrong, passed in (
        ("[x / 3.1 for x in xs]", 1),
        ("[x / 3 for x in xs][:1]", 2),
        ("'no'", 0),
        ("type('', (list,), {})()", 1),
    ):
        found = grade(problem, f"def third(xs): return {wrong}")
        assert (found.passed, found.total) == (passed, 3), wrong


def test_a_helper_whose_calls_cannot_be_answered_passes_nothing() -> None:
    problem = asserts(
        CLOSE.format(compare="assert np.allclose(out, exp)", inputs=[[1]] * 3, results=[1] * 3), entry_point="third"
    )
    for broken in ("def third(x): raise ValueError", "import os; os._exit(0)", "def other(x): return 1"):
        assert grade(problem, broken).passed == 0


def test_many_inputs_are_graded_in_a_few_runs() -> None:
    inputs = [[[float(number)] * 5] for number in range(1000)]
    results = [[number / 3] * 5 for number in range(1000)]
    problem = asserts(CLOSE.format(compare="assert np.allclose(out, exp)", inputs=inputs, results=results), entry_point="third")
    found = grade(problem, "def third(xs): return [x / 3 for x in xs]", rules=GradingRules(limits=Limits(cpu_s=6, wall_s=30)))
    assert (found.passed, found.total) == (1000, 1000) and found.run_time_s < 5
