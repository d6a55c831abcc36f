"""The arithmetic generator: tasks by identity, a true hold-out, free-form answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.arithmetic import Arithmetic, evaluate_expression
from strop.environments.base import EnvironmentConfigError
from strop.environments.compute_rewards import compute_rewards

DATA = DataSource(size=300, seed=1)


def test_a_task_depends_on_seed_and_index_alone():
    tasks, again = Arithmetic().tasks(DATA), Arithmetic().tasks(DATA)
    assert again[17] == tasks[17]
    assert [task.id for task in tasks] != [task.id for task in Arithmetic().tasks(replace(DATA, seed=2))]


def test_the_question_asks_what_the_answer_says():
    environment = Arithmetic(operators=("+", "-", "*"), operands=4, min_operand=-9, max_operand=9)
    for task in environment.tasks(DATA):
        assert eval(task.id) == int(task.answer)
        assert task.id in task.messages[-1].content


@pytest.mark.parametrize("validation", [DataSource(size=300, split="validation"), DataSource(size=300, part="validation")])
def test_no_validation_question_nor_a_reordering_is_trained_on(validation):
    environment = Arithmetic(max_operand=12)
    seen = {frozenset(task.id.split(" + ")) for seed in range(4) for task in environment.tasks(replace(DATA, seed=seed))}
    held = {frozenset(task.id.split(" + ")) for task in environment.tasks(validation)}
    assert held and not held & seen


def test_a_space_too_small_to_split_says_so():
    environment = Arithmetic(min_operand=1, max_operand=1)
    with pytest.raises(DataError, match="widen min_operand"):
        for part in ("train", "validation"):
            environment.tasks(replace(DATA, part=part))[0]


@pytest.mark.parametrize(("text", "value"), [("3 + 4 = 7", 1.0), ("7", 1.0), ("7.0", 1.0), ("7, not 8", 0.0), ("", 0.0)])
def test_the_last_number_is_the_answer(wrote, text, value):
    environment = Arithmetic()
    task = replace(environment.tasks(DATA)[0], answer="7")
    assert asyncio.run(compute_rewards(environment, task, wrote(task, text))).rewards == {"correct": value}


def test_votes_are_for_numbers(wrote):
    environment = Arithmetic()
    task = environment.tasks(DATA)[0]
    assert environment.answer_key(task, wrote(task, "so 7")) == environment.answer_key(task, wrote(task, "7.0")) == "7"
    assert environment.answer_key(task, wrote(task, "no idea")) is None


def test_the_data_section_words_the_prompt(tmp_path):
    (tmp_path / "cot.txt").write_text("Think.\n{question}\nNow answer.")
    data = replace(DATA, prompt_file=str(tmp_path / "cot.txt"), system_prompt="Be brief.")
    messages = Arithmetic().tasks(data)[0].messages
    assert [message.role for message in messages] == ["system", "user"]
    assert messages[1].content.startswith("Think.\nWhat is ") and messages[1].content.endswith("\nNow answer.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operators": ("/",)}, "choose from"),
        ({"operands": 1}, "at least 2"),
        ({"min_operand": 5, "max_operand": 4}, "above max_operand"),
        ({"wording": "Compute!"}, "no {expression}"),
        ({"held_out_fraction": 1.0}, "between 0 and 1"),
    ],
)
def test_options_that_make_no_sense_are_errors(options, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        Arithmetic(**options)


@given(st.lists(st.tuples(st.sampled_from("+-*"), st.integers(-99, 99)), min_size=1, max_size=6), st.integers(-99, 99))
def test_evaluation_follows_the_usual_precedence(rest, first):
    expression = str(first) + "".join(f"{operator}({number})" for operator, number in rest)
    assert evaluate_expression([first, *(number for _, number in rest)], [operator for operator, _ in rest]) == eval(expression)
