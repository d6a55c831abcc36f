"""DAPO's verifier. The expected scores and answers are those of NeMo-RL's and verl's, run on the same texts."""

from __future__ import annotations

import asyncio

import pytest

from strop.environments.base import PromptedTask
from strop.environments.compute_rewards import compute_rewards
from strop.extensions.math.dapo_verifier import extract_dapo_answer, score_dapo
from strop.extensions.math.math_environment import MathEnvironment

CASES = [
    ("12", "Answer: 12", 1.0, "12"),
    ("12", "answer :\t12", 1.0, "12"),
    ("12", "Answer: 3\nso\nAnswer: 12", 1.0, "12"),
    ("12", "Answer: 12\nAnswer: 3", 0.0, "3"),
    ("12", "The answer is 12", 0.0, "[INVALID]"),
    ("12", r"\boxed{12}", 0.0, "[INVALID]"),
    ("12", r"Answer: \boxed{12}", 1.0, "12"),
    ("12", "Answer: $12$.", 1.0, "12"),
    ("12", "Answer: x = 12", 1.0, "12"),
    ("1234", "Answer: 1,234", 1.0, "1234"),
    ("12", "Answer: 12 cm", 1.0, "12"),
    ("90", r"Answer: 90^\circ", 1.0, "90"),
    ("1/2", r"Answer: \frac12", 0.0, r"\frac{1}{2}"),
    (r"\frac{1}{2}", r"Answer: \frac12", 1.0, r"\frac{1}{2}"),
    (r"\sqrt{3}", r"Answer: \sqrt3", 1.0, r"\sqrt{3}"),
    ("even", r"Answer: \text{even}", 1.0, "even"),
    ("2", r"Answer: **2**", 0.0, "**2**"),
    ("12", "Answer: 12 " + "x" * 300, 0.0, "[INVALID]"),  # only the last 300 characters are looked at
    ("12", "", 0.0, "[INVALID]"),
    ("[INVALID]", "no answer", 1.0, "[INVALID]"),
]


@pytest.mark.parametrize(("reference", "text", "score", "answer"), CASES)
def test_an_answer_scores_as_it_does_there(reference: str, text: str, score: float, answer: str) -> None:
    assert (score_dapo(reference, text), extract_dapo_answer(text)) == (score, answer)


def test_the_environment_checks_with_it_in_a_process_of_its_own_and_votes_on_its_answer(wrote) -> None:
    environment = MathEnvironment(verifier="dapo", num_workers=1)
    task = PromptedTask(id="t", answer="12", messages=())
    for reference, text, score, answer in CASES[:6]:
        assert reference == task.answer
        rollout = wrote(task, text)
        assert dict(asyncio.run(compute_rewards(environment, task, rollout)).rewards) == {"correct": score, "unverified": 0.0}
        assert environment.answer_key(task, rollout) == (None if answer == "[INVALID]" else answer)
