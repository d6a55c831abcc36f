"""Sets of programs by name, from local copies of the real schema to the number."""

from __future__ import annotations

import pytest

from strop.data.sources import hub
from strop.data.sources.peek import peek_dataset
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.environments.registry import make_environment
from strop.extensions.code.code_environment import CodeEnvironment
from strop.extensions.code.code_sets import CODE_SETS
from support.scripted_evaluation import evaluate_script
from support.sweep import one_in

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
    "name", one_in(3, ["humaneval", "humaneval_plus", "mbpp", "mbpp_sanitized", "mbpp_plus", "livecodebench", "DeepCoder"])
)
def test_right_programs_have_accuracy_1_and_wrong_ones_0(name, local_hub, tiny_model_folder, monkeypatch, capsys) -> None:
    for answer, accuracy in ((solve, 1.0), (fail, 0.0)):
        report = evaluate_script(monkeypatch, capsys, tiny_model_folder, name, answer)
        assert report["metrics"]["accuracy"] == accuracy
        assert report["metrics"]["errors"] == 0


def test_options_of_the_environment_are_laid_over_those_of_the_set(local_hub, tiny_model_folder, monkeypatch, capsys) -> None:
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return solve(prompt)

    report = evaluate_script(
        monkeypatch, capsys, tiny_model_folder, "livecodebench", answer, "env.code.end_date=2023-12-31", "env.code.max_tests=1"
    )
    assert report["metrics"]["accuracy"] == 1.0
    assert len(prompts) == 1 and "### Question:" in prompts[0]


def tasks_of(name: str, purpose: str = "evaluation", **options: object):
    grader = CODE_SETS[name].grader
    assert grader is not None
    environment = make_environment(grader.environment, {**grader.options, **options})
    return environment.tasks(DataSource(dataset_name=name, purpose=purpose))


def test_every_set_has_its_own_splits(local_hub) -> None:
    for name, train, evaluated in (("mbpp", "601", "11"), ("mbpp_sanitized", "602", "12")):
        assert [tasks_of(name, purpose)[0].id for purpose in ("train", "evaluation")] == [train, evaluated]
    assert DataSource(dataset_name="mbpp", split="prompt").open_records()[1][0]["task_id"] == 2
    assert len(tasks_of("DeepCoder", "train")) == 4
    assert len(tasks_of("verifiable-coding-problems-python", "train")) == 1
    row = DataSource(dataset_name="OpenCodeReasoning").load_rows()[0]
    assert "sum" in str(row.prompt) and row.answer.startswith("<think>")


def test_a_release_of_livecodebench_has_those_before_it(local_hub) -> None:
    assert [len(tasks_of(f"livecodebench_release_v{number}")) for number in range(1, 7)] == [1, 2, 3, 4, 5, 6]
    assert len(tasks_of("livecodebench")) == 6
    with pytest.raises(DataError, match=r"no subset 'v5'; set subset to one of release_v1, .*release_v6"):
        DataSource(dataset_name="livecodebench", subset="v5").open_records()
    peek = peek_dataset("livecodebench", purpose="evaluation")
    assert peek is not None and peek.records[0]["question_title"] == "A. Sum"


@pytest.mark.parametrize(
    "dates, number",
    [
        ({"start_date": "2024-08-17"}, 5),
        ({"end_date": "2024-08-17"}, 2),
        ({"start_date": "2024-08-18", "end_date": "2025-04-01"}, 2),
    ],
)
def test_problems_of_livecodebench_are_chosen_by_the_days_of_their_contests(dates, number, local_hub) -> None:
    assert len(tasks_of("livecodebench", **dates)) == number


def test_days_without_problems_and_what_is_no_day_are_errors(local_hub) -> None:
    with pytest.raises(DataError, match="of 2023-05-07 to 2025-06-01, none between start_date 2026-01-01 and end_date None"):
        tasks_of("livecodebench", start_date="2026-01-01")
    with pytest.raises(EnvironmentConfigError, match="end_date is 'June', which is no date; write it as 2024-08-01"):
        tasks_of("livecodebench", end_date="June")
    with pytest.raises(DataError, match="contest_date"):
        tasks_of("mbpp", start_date="2024-08-17")


def test_prompts_are_those_that_results_are_reported_with(local_hub) -> None:
    system, user = tasks_of("livecodebench")[0].messages
    assert system.content.startswith("You are an expert Python programmer. You will be given a question")
    assert user.content.startswith(
        "### Question:\nRead two integers and print their sum.\n\n### Format: Read the inputs from stdin"
    )
    assert user.content.endswith("```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the provided format with backticks)\n\n")
    assert "```python\nclass Solution:\n    def scale(" in tasks_of("livecodebench")[1].messages[1].content
    (user,) = tasks_of("mbpp")[0].messages
    assert user.content.startswith(
        "You are an expert Python programmer, and here is your task: Write a function to square a number. "
    )
    assert user.content.count("assert ") == 3 and "'2'" not in user.content
    (user,) = tasks_of("mbpp_plus")[0].messages
    assert user.content.count("assert ") == 3 and "inputs" not in user.content
    own = DataSource(dataset_name="livecodebench", purpose="evaluation", system_prompt="Be brief.")
    assert CodeEnvironment(wording="benchmark").tasks(own)[0].messages[0].content == "Be brief."


def test_benchmark_wording_has_no_instruction_of_yours() -> None:
    with pytest.raises(EnvironmentConfigError, match="wording=benchmark is for python"):
        CodeEnvironment(wording="benchmark", instruction="Use C.")


def test_files_of_the_hub_are_addresses_with_the_revision(monkeypatch) -> None:
    import datasets

    asked = []
    monkeypatch.setattr(hub, "_check_hub", lambda name, revision: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: asked.append((names, options)) or [1])
    hub.open_hub("livecodebench/code_generation_lite", "release_v2", "test", "abc", ("test.jsonl", "test2.jsonl"))
    folder = "hf://datasets/livecodebench/code_generation_lite@abc"
    files = {"test": [f"{folder}/test.jsonl", f"{folder}/test2.jsonl"]}
    assert asked == [(("json",), {"data_files": files, "split": "test"})]
