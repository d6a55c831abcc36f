"""Letters of multiple-choice questions, and several rewards for one answer. What is expected is what NeMo-RL's workers return."""

from __future__ import annotations

import asyncio

import pytest

from strop.environments.base import PromptedTask
from strop.environments.compute_rewards import compute_rewards
from strop.extensions.math.math_environment import MathEnvironment, MathMultiReward
from strop.extensions.math.math_verifier import extract_english_choice, extract_multilingual_choice


@pytest.mark.parametrize(
    ("text", "english", "multilingual"),
    [
        ("Answer: B", "B", "B"),
        ("**Answer:** $\\boxed{C}$", "C", "C"),
        ("Answer: J", "J", None),  # of ten options; the other list ends with D
        ("Answer: b", "b", "b"),
        ("Answer: A\nAnswer: B", "A", "A"),
        ("The answer is B", None, None),
        ("Answer:\nB", None, None),
        ("答案：B", None, "B"),
        ("Antwort: C", None, "C"),
        ("الإجابة: ب", None, "B"),
        ("উত্তর: ড", None, "C"),
        ("答え： Ｄ", None, "D"),
        ("", None, None),
    ],
)
def test_the_letter_after_an_announcement_is_the_answer(text: str, english: str | None, multilingual: str | None) -> None:
    assert (extract_english_choice(text), extract_multilingual_choice(text)) == (english, multilingual)


@pytest.mark.parametrize("verifier", ["english_multichoice", "multilingual_multichoice"])
def test_the_environment_compares_the_letter_with_the_reference(verifier, wrote) -> None:
    environment = MathEnvironment(verifier=verifier)
    task = PromptedTask(id="t", answer="B", messages=())
    for text, expected in (("Answer: B", 1.0), ("Answer: A", 0.0), ("B", 0.0)):
        assert asyncio.run(compute_rewards(environment, task, wrote(task, text))).reward == expected
    assert environment.answer_key(task, wrote(task, "Answer: C")) == "C"


@pytest.mark.parametrize(
    ("text", "rewards"),
    [
        ("<think>so</think>\n<answer>42</answer>", (1.0, 1.0, 1.0)),
        ("<answer>42</answer>", (1.0, 1.0, 0.0)),
        ("<think>so</think>\n<answer>41</answer>", (0.0, 1.0, 1.0)),
        ("<think>so</think>\n<answer>forty</answer>", (0.0, 0.0, 1.0)),
        ("<answer>1</answer><answer> 42 </answer>", (1.0, 1.0, 0.0)),
        ("42", (1.0, 1.0, 0.0)),
        ("-42", (0.0, 0.0, 0.0)),
    ],
)
def test_three_rewards_judge_an_answer_in_tags(text: str, rewards: tuple[float, float, float], wrote) -> None:
    task = PromptedTask(id="t", answer="42", messages=())
    found = asyncio.run(compute_rewards(MathMultiReward(), task, wrote(task, text))).rewards
    assert found == dict(zip(("correctness", "integer", "format"), rewards, strict=True))
