"""reasoning-gym's tasks by name, its own scores, and answers that are programs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.environments.compute_rewards import compute_rewards
from strop.extensions.adapters.reasoning_gym import ReasoningGym
from support.sweep import sweep

pytest.importorskip("reasoning_gym")
DATA = DataSource(size=20, seed=3)


def rewards(environment: ReasoningGym, rollout, task) -> dict[str, float]:
    return dict(asyncio.run(compute_rewards(environment, task, rollout)).rewards)


@pytest.mark.parametrize("name", sweep(["chain_sum", "leg_counting", "simple_integration", "sudoku"], "leg_counting"))
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


COMPOSITE = {
    "datasets": [
        {"name": "chain_sum", "weight": 3, "config": {"max_terms": 2}},
        {"name": "leg_counting", "weight": 1, "level": 0},
    ]
}


def test_a_composite_draws_tasks_by_weight_and_scores_each_by_its_own_verifier(wrote):
    environment = ReasoningGym(task="composite", options=COMPOSITE, num_workers=1)
    tasks = environment.tasks(replace(DATA, size=200))
    sources = [tasks[index].metadata["metadata"]["source_dataset"] for index in range(200)]
    assert 120 < sources.count("chain_sum") < 180 and set(sources) == {"chain_sum", "leg_counting"}
    for name in ("chain_sum", "leg_counting"):
        task = tasks[sources.index(name)]
        rollout = wrote(task, f"<answer>{task.answer}</answer>")
        assert rewards(environment, rollout, task)["score"] == 1.0
        assert rollout.metrics == {f"score/{name}": 1.0}
        assert rewards(environment, wrote(task, "<answer>-77</answer>"), task)["correct"] == 0.0
    assert environment.tasks(replace(DATA, size=200))[7] == tasks[7]


def test_a_composite_asks_what_the_packages_own_composite_asks():
    from reasoning_gym import create_dataset
    from reasoning_gym.composite import DatasetSpec

    from strop.extensions.adapters.reasoning_gym import make_dataset

    environment = ReasoningGym(task="composite", options={"datasets": [{"name": "chain_sum"}, {"name": "sudoku", "weight": 2.0}]})
    specs = [DatasetSpec("chain_sum", 1.0, {}), DatasetSpec("sudoku", 2.0, {})]
    own, theirs = (
        make_dataset("composite", environment._dataset_options, 5, 6),
        create_dataset("composite", datasets=specs, seed=5, size=6),
    )
    assert [own[index] for index in range(6)] == [theirs[index] for index in range(6)]


def test_a_level_of_the_curriculum_makes_tasks_harder():
    easy, hard = (ReasoningGym(task="chain_sum", level=level).tasks(replace(DATA, size=30)) for level in (0, 3))
    assert sum(len(task.question) for task in easy) < sum(len(task.question) for task in hard)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_sums", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"options": {"max_term": 3}}, "did you mean 'max_terms'"),
        ("chain_sum", {"options": {"min_terms": 9, "max_terms": 3}}, "max_terms must be >= min_terms"),
        ("chain_sum", {"options": {"seed": 3}}, "set seed in the data section"),
        ("chain_sum", {"level": 99}, "has the levels 0 to"),
        ("composite", {}, "rejects the options"),
        ("composite", {"options": {"datasets": [{"name": "chain_sums"}]}}, "did you mean 'chain_sum'"),
        ("composite", {"options": {"datasets": [{"name": "chain_sum", "wait": 1}]}}, "a mapping with name"),
        ("composite", {"options": {"datasets": [{"name": "chain_sum", "config": {"max_term": 1}}]}}, "did you mean 'max_terms'"),
    ],
)
def test_what_the_installed_version_would_not_accept_is_an_error(task, options, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        ReasoningGym(task=task, **options)
