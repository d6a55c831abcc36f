"""Notebooks, a corpus and pages: what the policy sees through its tools, and which answers count."""

from __future__ import annotations

import pytest

from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.registry import make_environment
from strop.extensions.tasks.base import find_answer, same_answer
from strop.types import ToolCall
from support.agent_tasks import Play, last_message, list_calls, make_tasks

KINDS = {"software": "tests", "terminal": "tests", "data_science": "correct", "research": "correct", "web_pages": "correct"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_ten_tasks_are_solved_by_their_solutions_and_not_by_nothing(play: Play, kind: str):
    tasks = make_tasks(kind)
    solved = play(kind, [(task, list_calls(task), last_message(task)) for task in tasks])
    idle = play(kind, [(task, [], "I am done. All tests passed.") for task in tasks])
    assert [rollout.rewards[KINDS[kind]] for rollout, _ in solved] == [1.0] * 10
    assert [rollout.rewards[KINDS[kind]] for rollout, _ in idle] == [0.0] * 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_is_the_same_in_every_run_and_one_is_solved(play: Play, kind: str):
    assert make_tasks(kind, 12) == make_tasks(kind, 12) and make_tasks(kind, 12)[:10] == make_tasks(kind)
    task = make_tasks(kind)[1]
    solved, idle = play(kind, [(task, list_calls(task), last_message(task)), (task, [], "Answer: none")])
    assert solved[0].rewards == {KINDS[kind]: 1.0} and idle[0].rewards == {KINDS[kind]: 0.0}


def test_a_notebook_keeps_its_variables_until_it_ends(play: Play):
    cells = ["x = 40", "import os; os.system('echo from a program'); x + 2", "print('before'); 1 / 0", "x += 1; x",
             "import time; time.sleep(9)", "'x' in globals()", "import os; os._exit(0)", "1 + 1"]  # fmt: skip
    calls = [ToolCall("python", {"code": cell}) for cell in cells]
    [(_, read)] = play("data_science", [(make_tasks("data_science")[0], calls, "")], tools=[{"notebook": {"timeout_s": 2.0}}])
    assert (
        read[0] == "(no output)" and read[1] == "from a program\n42" and read[3] == "41" and read[5] == "False" and read[7] == "2"
    )
    assert read[2].startswith("before\nTraceback") and read[2].endswith("ZeroDivisionError: division by zero")
    assert read[4] == "The process reached its limit of 2 s. It starts again, without its variables."
    assert read[6] == "The process was ended (exit). It starts again, without its variables."


def test_a_browser_says_what_it_cannot_do(play: Play):
    calls = [
        ("open_page", {"address": "http://127.0.0.1:8000/item/99"}),
        ("open_page", {"address": "file:///srv/shop.json"}),
        ("open_page", {"address": "http://127.0.0.1:8000/account"}),
        ("click", {"what": "Help"}),
        ("fill", {"field": "name", "value": "x"}),
        ("fill", {"field": "user", "value": "a\"' & ü"}),
        ("click", {"what": "Log in"}),
    ]
    [(_, read)] = play("web_pages", [(make_tasks("web_pages")[0], [ToolCall(name, values) for name, values in calls], "")])
    assert "There is no such page" in read[0] and read[1] == "only http and https addresses can be opened"
    assert read[3] == "there is no link and no button 'Help'"
    assert read[4] == "there is no field 'name'; there are: user, password"
    assert "Wrong user or password" in read[6]


def test_an_answer_from_a_corpus_counts_with_its_documents_and_no_others(play: Play):
    task = next(task for task in make_tasks("research") if task.answer == "Loam")
    texts = ["Answer: Loam [person-4] [town-5]", "By [person-4, town-5].\n**Answer: loam**", "Answer: Loam", "Answer: Loam [town-5]",
             "Answer: Loam [person-4] [town-5] [town-1]", "Answer: Sorn [person-4] [town-5]"]  # fmt: skip
    assert [rollout.rewards["correct"] for rollout, _ in play("research", [(task, [], text) for text in texts])] == [
        1,
        1,
        0,
        0,
        0,
        0,
    ]
    with pytest.raises(DataError, match="has no documents"):
        list(make_environment("research", {}).tasks(DataSource(rows=[{"problem": "?", "answer": "x"}])))


@pytest.mark.parametrize(
    "text, wanted, same",
    [
        ("Answer: 4", "4.0", True),
        ("**Answer: Blue  Lamp.**", "blue lamp", True),
        ("answer: 3\nAnswer: 4", "3", False),
        ("4", "4", False),
    ],
)
def test_the_last_line_with_an_answer_counts(text: str, wanted: str, same: bool):
    assert same_answer(find_answer(text), wanted) is same
