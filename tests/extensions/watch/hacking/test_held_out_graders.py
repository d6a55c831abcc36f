"""Graders that a run is never trained on, as the section monitor gives them."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from strop.environments.base import EnvironmentConfigError
from strop.environments.verifier_registry import list_verifiers
from strop.extensions.watch.watched_rollout import make_grader
from strop.types import Task
from support.llm_server import llm_server

TASK = Task(id="t", question="Capital of France?", answer="Paris")
OWN = """
from dataclasses import dataclass
from strop.environments.verifiers.base import Verifier

def shouts(task, rollout):
    return rollout.text.isupper()

@dataclass(frozen=True, kw_only=True)
class Contains(Verifier):
    word: str = "Paris"
    def score(self, task, reply):
        return self.word in reply.text
"""


def grade(given: Any, rollout: Any) -> float:
    graded = make_grader(given, "monitor.second_grader")(TASK, rollout)
    return float(asyncio.run(graded) if inspect.iscoroutine(graded) else graded)


def test_a_grader_is_a_function_a_verifier_with_options_or_a_method_of_math(talk, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    rollout = talk(TASK, "<think>Rome?</think> I say <answer>paris</answer>")
    assert grade({"verifier": "exact_match", "tag": "answer"}, rollout) == 1.0
    assert grade("exact_match", rollout) == grade({"verifier": "exact_match"}, rollout) == 0.0
    assert 0 < grade("f1", talk(TASK, "It is Paris")) < 1
    assert grade("own.py:shouts", rollout) == grade({"function": "own.py:shouts"}, rollout) == 0.0
    assert grade("own.py:Contains", rollout) == 0.0
    assert grade({"verifier": "own.py:Contains", "word": "say"}, rollout) == 1.0
    for name in ("exact", "english_multichoice"):
        assert grade(name, rollout) == 0.0
    assert rollout.metrics == {}  # what a grader measures is not the rollout's


def test_a_judge_is_a_grader(talk):
    def reply(request, number):
        mark = request["messages"][-1]["content"].split("VERDICT ")[1].split(":")[0]
        return f'VERDICT {mark}: {{"correct": 1}}'

    with llm_server(reply) as server:
        given = {"verifier": "judge", "endpoint": {"base_url": server.base_url, "model": "m"}}
        assert grade(given, talk(TASK, "Paris.")) == 1.0


def test_every_verifier_is_known_as_a_grader():
    for name in list_verifiers():
        try:
            make_grader(name, "monitor.judges")
        except EnvironmentConfigError as error:
            assert "there is no verifier" not in str(error)  # it needs options, a package, or compares rollouts


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("exact_mach", r"monitor.judges: there is no verifier 'exact_mach'; did you mean 'exact_match'"),
        ({"verifier": "exact_match", "weight": 2}, "has no option 'weight'"),
        ({"tag": "answer"}, "does not name one of them; set verifier"),
        ({"verifier": "f1", "function": "a.py:b"}, "does not name one of them"),
        (
            {"verifier": "pairwise_judge", "endpoint": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}},
            "compares the rollouts of a task, and a grader sees one rollout at a time",
        ),
        ({"function": "json:dumps", "indent": 2}, "the function json:dumps has no option 'indent'"),
        ("json:JSONDecoder", "not a function; it is called with"),
    ],
)
def test_what_cannot_be_a_grader_is_an_error_that_says_why(given, said):
    with pytest.raises(EnvironmentConfigError, match=said):
        make_grader(given, "monitor.judges")
