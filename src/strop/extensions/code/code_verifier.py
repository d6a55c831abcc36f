"""Programs as a part of a reward: the tests of a row, run in the sandbox on the program of a reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from strop.data.sources.records import DataError
from strop.environments.base import EnvironmentConfigError
from strop.environments.verifiers.base import Reply, Score, Verifier, check_positive, read_path
from strop.extensions.code.code_problem import CodeProblem, StdioTest
from strop.extensions.code.extract_code import extract_code
from strop.extensions.code.grade_code import GradingRules, grade_code
from strop.extensions.code.problem_rows import find_shape, read_problem
from strop.extensions.code.sandbox.base import Limits
from strop.extensions.code.sandbox.sandbox_pool import get_sandbox
from strop.types import Task


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
