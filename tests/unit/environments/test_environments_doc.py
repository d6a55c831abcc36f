"""The examples of docs/environments.md, run as they stand there."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest

from strop.data.sources.source import DataSource
from strop.endings import Ending
from strop.environments.compute_rewards import compute_group_rewards, compute_rewards
from strop.environments.registry import make_environment
from strop.types import Task

DOC = Path(__file__).parents[3] / "docs" / "environments.md"
EXAMPLES = {
    block.splitlines()[0].removeprefix("# "): block for block in re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
}


@pytest.fixture
def example(tmp_path):
    def write(name: str) -> Path:
        path = tmp_path / name
        path.write_text(EXAMPLES[name])
        return path

    return write


def test_the_example_functions_score(example, wrote):
    path, task = example("rewards.py"), Task(id="t", answer="2")
    short = {"function": f"{path}:shortest", "weight": 0.2}
    environment = make_environment("reward_function", {"rewards": {"correct": f"{path}:correct", "short": short}})
    first, second = wrote(task, "It is 2."), wrote(task, "It is", "2.")
    scored = [replace(each, **vars(asyncio.run(compute_rewards(environment, task, each)))) for each in (first, second)]
    results = asyncio.run(compute_group_rewards(environment, task, scored))
    assert [result.rewards for result in results] == [{"correct": 1.0, "short": 1.0}, {"correct": 1.0, "short": 0.0}]
    assert [result.reward for result in results] == [pytest.approx(1.2), 1.0]


def test_the_example_environment_prompts_and_scores(example, wrote):
    environment = make_environment(f"{example('reversal.py')}:Reversal", {"letters": 5})
    train = environment.tasks(DataSource(size=20))
    task = train[3]
    assert len(task.answer) == 5 and task.question in environment.prompt(task)[0].content
    assert environment.tasks(DataSource(size=20))[3] == task
    assert {t.id for t in train}.isdisjoint(t.id for t in environment.tasks(DataSource(size=20, split="validation")))
    scored = asyncio.run(compute_rewards(environment, task, wrote(task, task.answer)))
    assert scored.rewards == {"correct": 1.0, "brief": 1.0, "characters": 5.0}
    assert scored.reward == pytest.approx(1.1)


def test_the_table_of_endings_is_that_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \| (policy|task|code|infrastructure) \| (.*) \|$", DOC.read_text(), re.MULTILINE)
    assert rows == [(each.value, each.who.value, each.meaning) for each in Ending]


@pytest.mark.parametrize(("status", "ending"), [(None, Ending.SERVICE), (-11, Ending.CRASH)])
def test_the_example_that_raises_says_who_can_cause_it(status, ending):
    names = {}
    (source,) = (text for text in re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL) if "def check(" in text)
    exec(source, names)
    names["check"](0)
    with pytest.raises(names["RolloutFailed"]) as raised:
        names["check"](status)
    assert raised.value.ending == ending
