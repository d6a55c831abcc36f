"""reasoning-gym's tasks by name, its own scores, and answers that are programs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError, compute_rewards
from strop.environments.reasoning_gym import ReasoningGym

pytest.importorskip("reasoning_gym")
DATA = DataSource(size=20, seed=3)


def rewards(environment: ReasoningGym, rollout, task) -> dict[str, float]:
    return dict(asyncio.run(compute_rewards(environment, task, rollout)).rewards)


@pytest.mark.parametrize("name", ["chain_sum", "leg_counting", "simple_integration", "sudoku"])
def test_the_reference_answer_scores_one_and_nonsense_less(name, wrote):
    environment = ReasoningGym(task=name, num_workers=1)
    task = environment.tasks(DATA)[4]
    assert rewards(environment, wrote(task, f"I see. <answer>{task.answer}</answer>"), task) == {
        "score": 1.0,
        "correct": 1.0,
        "unverified": 0.0,
    }
    assert rewards(environment, wrote(task, "<answer>banana</answer>"), task)["correct"] == 0.0
    assert rewards(environment, wrote(task, task.answer), task)["score"] == 0.0  # no tags


def test_an_answer_that_is_a_program_does_nothing(tmp_path, wrote):
    environment = ReasoningGym(task="simple_integration", num_workers=1)
    task = environment.tasks(DATA)[0]
    attack = f"__import__('os').system('touch {tmp_path}/owned')"
    assert rewards(environment, wrote(task, f"<answer>{attack}</answer>"), task)["correct"] == 0.0
    attack = f"__import__('pathlib').Path('{tmp_path}/owned').touch()"
    assert rewards(environment, wrote(task, f"<answer>{attack}</answer>"), task)["correct"] == 0.0
    assert list(tmp_path.iterdir()) == []


def test_one_answer_cannot_change_how_the_next_is_scored(wrote):
    environment = ReasoningGym(task="simple_integration", num_workers=1)
    task = environment.tasks(DATA)[0]
    attack = "setattr(__import__('sympy').Basic, '__eq__', lambda a, b: True)"
    rewards(environment, wrote(task, f"<answer>{attack}</answer>"), task)
    assert rewards(environment, wrote(task, "<answer>x**99 + C</answer>"), task)["correct"] == 0.0


def test_tasks_depend_on_seed_and_index_and_validation_is_held_out():
    environment = ReasoningGym(task="chain_sum", options={"max_terms": 2, "max_digits": 1})
    tasks = environment.tasks(replace(DATA, size=200))
    assert environment.tasks(replace(DATA, size=200))[7] == tasks[7]
    validation = environment.tasks(DataSource(size=200, seed=3, split="validation"))
    assert not {task.question for task in tasks} & {task.question for task in validation}


def test_answers_are_found_where_the_option_says():
    def answer(extract, text):
        return ReasoningGym(task="chain_sum", extract=extract).extract_answer(text)

    assert answer("tags", "<answer>1</answer> or <answer> 2 </answer>") == "2"
    assert answer("tags", "2") is None
    assert answer("tags_or_text", " 2 ") == "2"
    assert answer("number", "it is 1,002.") == "1002"
    assert answer("number", "it is 2.5") == "2.5"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sums", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"max_term": 3}, "did you mean 'max_terms'"),
        ("chain_sum", {"min_terms": 9, "max_terms": 3}, "max_terms must be >= min_terms"),
        ("chain_sum", {"seed": 3}, "set seed in the data section"),
    ],
)
def test_what_the_installed_version_would_not_accept_is_an_error(name, options, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        ReasoningGym(task=name, options=options)
