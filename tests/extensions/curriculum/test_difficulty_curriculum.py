"""From easy to hard: how the window grows, what is drawn of it, and where the numbers come from."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from strop.data.sources.records import DataError
from strop.extensions.curriculum.base import Draw, TaskOutcome
from strop.extensions.curriculum.curricula import DifficultyCurriculum, compute_window, make_curriculum, read_difficulties
from strop.extensions.curriculum.curriculum_config import CurriculumConfig
from strop.extensions.curriculum.curriculum_keys_config import DifficultyConfig
from strop.types import Task


def draw(seed: int, step: int, in_flight: frozenset[int] = frozenset()) -> Draw:
    return Draw(position=seed, step=step, usual=4, in_flight=in_flight, random=Random(seed))


def drawn(step: int, **options: Any) -> set[int]:
    """The tasks of 0 .. 9, each as hard as its number, that are drawn at a step."""
    curriculum = DifficultyCurriculum(range(10), DifficultyConfig(by="level", **options), seed=1)
    return {curriculum.choose(draw(seed, step)).task for seed in range(300)}


def test_the_window_grows_by_its_pacing() -> None:
    def windows(**options: Any) -> list[float]:
        config = DifficultyConfig(by="level", start=0.2, steps=10, **options)
        return [compute_window(config, step) for step in (0, 3, 5, 9, 10, 50)]

    assert windows() == pytest.approx([0.2, 0.44, 0.6, 0.92, 1, 1])
    assert windows(pacing="root") == pytest.approx([0.2, (0.04 + 0.96 * 0.3) ** 0.5, 0.52**0.5, (0.04 + 0.96 * 0.9) ** 0.5, 1, 1])
    assert windows(pacing="step", stages=2) == pytest.approx([0.2, 0.2, 0.6, 0.6, 1, 1])


def test_easy_tasks_come_first_and_all_of_them_in_the_end() -> None:
    assert drawn(0, steps=10) == {0, 1}
    assert drawn(5, steps=10) == {0, 1, 2, 3, 4, 5}
    assert drawn(10, steps=10) == {4}  # as without a curriculum
    assert drawn(0, steps=10, order="hard_to_easy") == {9, 8}


def test_a_largest_window_leaves_the_easy_ones_behind() -> None:
    assert drawn(5, steps=10, window=0.2) == {4, 5}
    assert drawn(10, steps=10, window=0.2) == drawn(99, steps=10, window=0.2) == {8, 9}


def test_tasks_in_flight_are_not_drawn_unless_the_window_has_no_others() -> None:
    curriculum = DifficultyCurriculum(range(10), DifficultyConfig(by="level"), seed=1)
    assert {curriculum.choose(draw(seed, 0, frozenset({0}))).task for seed in range(50)} == {1}
    assert {curriculum.choose(draw(seed, 0, frozenset({0, 1}))).task for seed in range(50)} == {0, 1}


def test_equally_hard_tasks_are_in_an_order_of_the_seed() -> None:
    def first(seed: int) -> set[int]:
        curriculum = DifficultyCurriculum([1.0] * 20, DifficultyConfig(by="level", start=0.1), seed)
        return {curriculum.choose(draw(each, 0)).task for each in range(60)}

    assert len(first(1)) == 2 and first(1) == first(1) and len({frozenset(first(seed)) for seed in range(5)}) > 1


def test_metrics_say_how_hard_the_task_is() -> None:
    curriculum = DifficultyCurriculum([5.0, 3.0], DifficultyConfig(by="level", start=0.5), seed=1)
    assert curriculum.choose(draw(1, 0)).metrics == {"difficulty": 3.0, "window": 0.5, "entropy": 0.0}


ROWS = [Task(id=f"row {n}", metadata={"level": n, "meta": {"grade": str(n)}, "a.b": n}, question="?" * n) for n in range(3)]


def test_difficulties_are_a_column_or_a_function(tmp_path: Path) -> None:
    assert read_difficulties("level", ROWS, "math") == [0, 1, 2] == read_difficulties("meta.grade", ROWS, "math")
    assert read_difficulties("a.b", ROWS, "math") == [0, 1, 2]
    (tmp_path / "hard.py").write_text("def length(task):\n    return len(task.question)\n")
    assert read_difficulties(f"{tmp_path}/hard.py:length", ROWS, "math") == [0, 1, 2]


@pytest.mark.parametrize(
    ("metadata", "by", "said"),
    [
        ({"level": "Level 3"}, "level", "data.curriculum.difficulty.by: level is 'Level 3' for x of math, which is not a number"),
        ({"level": float("nan")}, "level", "level is nan for x of math, which is not a number"),
        ({"level": None}, "level", "level is None"),
        ({"level": 1, "kind": 2}, "levle", "x has no column 'levle'; there are: level, kind. Set data.curriculum.difficulty.by"),
        ({"level": 1}, "level.deeper", "x has no column 'level.deeper'"),
        ({}, "math:nothing", "data.curriculum.difficulty.by: 'math' has no 'nothing'"),
        ({}, "math:pi", "not a function of a task"),
        ({}, "math:sqrt", "math:sqrt raised TypeError"),
    ],
)
def test_what_is_no_number_is_an_error_that_names_the_task(metadata: dict[str, Any], by: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        read_difficulties(by, [Task(id="x", metadata=metadata)], "math")
    assert said in str(caught.value)


OWN = """
from strop.extensions.curriculum.base import Choice, Curriculum

class Backwards(Curriculum):
    def __init__(self, tasks, jump=1):
        self.size, self.jump = len(tasks), jump

    def choose(self, draw):
        return Choice(self.size - 1 - draw.position * self.jump % self.size, {"place": 1.0})

class NotOne:
    pass
"""


def test_a_class_of_ones_own_is_made_with_the_tasks_and_its_options(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = CurriculumConfig(name=f"{tmp_path}/own.py:Backwards", kwargs={"jump": 2})
    assert make_curriculum(config, ROWS, "math", 1).choose(draw(1, 0)).task == 0
    for name, kwargs, said in (
        ("Backwards", {"jmup": 2}, "own.py:Backwards(tasks=..., jmup=...) raised TypeError"),
        ("NotOne", {}, "not a subclass of strop.extensions.curriculum.base.Curriculum"),
        ("Missing", {}, "has no 'Missing'"),
    ):
        with pytest.raises(DataError) as caught:
            make_curriculum(CurriculumConfig(name=f"{tmp_path}/own.py:{name}", kwargs=kwargs), ROWS, "math", 1)
        assert said in str(caught.value)


def test_the_class_of_the_page_goes_backwards_and_repeats_what_was_never_solved(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "curriculum.md").read_text()
    (tmp_path / "order.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    curriculum = make_curriculum(CurriculumConfig(name=f"{tmp_path}/order.py:Backwards", kwargs={"again": 2}), ROWS, "math", 1)
    assert [curriculum.choose(draw(place, 0)).task for place in range(4)] == [2, 1, 0, 2]
    curriculum.observe(TaskOutcome(task=1, position=1, step=0, scores=(0.0, 0.0)))
    curriculum.observe(TaskOutcome(task=0, position=2, step=0, scores=(0.0, 1.0)))
    assert curriculum.state() == {"unsolved": [1, 1]}
    assert [curriculum.choose(draw(4, 0)).task for _ in range(3)] == [1, 1, 1]


class Streamed(list[Task]):
    def load_state(self, state: object) -> None: ...


@pytest.mark.parametrize("name", ["difficulty", "success_rate"])
def test_a_stream_has_no_curriculum(name: str) -> None:
    with pytest.raises(DataError, match=r"data\.curriculum\.name is \w+, but math is read as a stream"):
        make_curriculum(CurriculumConfig(name=name), Streamed(ROWS), "math", 1)
