"""Problems in the words that results of benchmarks are reported with: LiveCodeBench's own for models that chat, and MBPP's."""

from __future__ import annotations

from collections.abc import Sequence

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
