"""Sets of programs by name, from local copies of the real schema to the number."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.data.builtin.code_sets import CODE_SETS
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.code.code_environment import CodeEnvironment
from support.scripted_evaluation import evaluate_script

ANSWERS = {  # by what a prompt says: programs that are right
    "Return the half of each number": "def halves(numbers): return [number / 2 for number in numbers]",
    "square a number": "def square(x):\n    assert not isinstance(x, str)  # as a challenge test hands it\n    return x * x",
    "Read two integers": "print(sum(map(int, input().split())))",
    "Multiply each number": "class Solution:\n    def scale(self, nums, k): return [k * x for x in nums]",
    "Print the sum of": "print(sum(map(int, input().split())))",
    "Double it": "def twice(x): return 2 * x",
    "Add the two": "class Solution:\n    def add(self, a, b): return a + b",
}
WRONG = "class Solution:\n    pass\ndef halves(numbers): return 7\ndef square(x): return 7\ndef twice(x): return 7\nprint(7)"


def solve(prompt: str) -> str:
    return f"Here it is.\n```python\n{next(code for words, code in ANSWERS.items() if words in prompt)}\n```"


def fail(prompt: str) -> str:
    return f"```python\n{WRONG}\n```"


@pytest.mark.parametrize(
    "name", ["humaneval", "humaneval_plus", "mbpp", "mbpp_sanitized", "mbpp_plus", "livecodebench", "DeepCoder"]
)
def test_right_programs_have_accuracy_1_and_wrong_ones_0(name, local_hub, tiny_model_folder, monkeypatch, capsys) -> None:
    for answer, accuracy in ((solve, 1.0), (fail, 0.0)):
        report = evaluate_script(monkeypatch, capsys, tiny_model_folder, name, answer)
        assert report["metrics"]["accuracy"] == accuracy
        assert report["metrics"]["errors"] == 0
