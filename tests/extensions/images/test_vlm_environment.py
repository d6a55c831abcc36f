"""NeMo-RL's rewards of questions with images: its values, its weights, and options that are checked when they are read."""

from __future__ import annotations

import asyncio

import pytest
import torch

from strop.environments.base import EnvironmentConfigError, PromptedTask
from strop.environments.compute_rewards import compute_rewards
from strop.environments.registry import list_marks, make_environment
from strop.extensions.images.vlm_environment import find_tagged, score_box
from strop.types import Rollout, Turn, user

GOOD = "<think>two and one</think> <answer> 3 </answer>"


def reply(text: str, answer: str) -> tuple[PromptedTask, Rollout]:
    task = PromptedTask(id="1", question="How many?", answer=answer, messages=(user("How many?"),))
    none = torch.zeros(0)
    turn = Turn(author="policy", tokens=none.long(), text=text, logprobs=none, versions=none.int())
    return task, Rollout(task=task, sample=0, seed=0, messages=(), prompt=none.long(), turns=(turn,))


def score(rewards: list[dict], text: str, answer: str) -> tuple[float, float]:
    """Return the reward and the accuracy of a reply."""
    environment = make_environment("vlm", {"rewards": rewards})
    task, rollout = reply(text, answer)
    scored = asyncio.run(compute_rewards(environment, task, rollout))
    return scored.reward, scored.rewards["correct"]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (GOOD, "3", (1.0, 1.0)),
        ("<answer>3.</answer>", "3", (0.95, 1.0)),
        ("<think>x</think><answer>4</answer>", "3", (0.2, 0.0)),
        ("<think>x</think> 3", "3", (0.05, 0.0)),
        ("3", "3", (0.0, 0.0)),
        ("<answer> Yes! </answer>", "yes", (0.95, 1.0)),
        ("</answer>3<answer>", "3", (0.0, 0.0)),
    ],
)
def test_format_and_exact_answers_count_by_their_weights(text: str, answer: str, expected: tuple[float, float]) -> None:
    given = score([{"name": "format", "weight": 1}, {"name": "exact_alnum", "weight": 4}], text, answer)
    assert given == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>[0, 0, 10, 10]</answer>", 1.0),
        ("<answer>[0, 0, 10, 5]</answer>", 0.5),
        ("<answer>[10, 0, 20, 10]</answer>", 0.0),  # they touch: the hull is filled
        ("<answer>[20, 0, 30, 10]</answer>", -1 / 3),  # a third of the hull is empty
        ("<answer>[0, 0, 10]</answer>", 0.0),
        ("<answer>[0, 0, nan, 10]</answer>", 0.0),
        ("[0, 0, 10, 10]", 0.0),
    ],
)
def test_boxes_are_compared_by_their_generalized_overlap(text: str, expected: float) -> None:
    given = score_box("[0, 0, 10, 10]", text)
    assert given.value == pytest.approx(expected) and given.correct == (expected > 0.5)


def test_below_a_threshold_alone_the_overlap_is_generalized() -> None:
    far, near = "<answer>[20, 0, 30, 10]</answer>", "<answer>[0, 0, 10, 8]</answer>"
    assert score_box("[0, 0, 10, 10]", far, giou_penalty_thres=-1).value == 0.0
    assert score_box("[0, 0, 10, 10]", near, giou_penalty_thres=0.5).value == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>x</think> \\boxed{\\frac{1}{2}}", (1.0, 1.0)),
        ("\\boxed{0.5}", (0.9, 1.0)),
        ("<think>x</think> \\boxed{3} or \\boxed{4}", (0.1, 0.0)),
        ("<think>x</think> \\boxed{1", (0.0, 0.0)),
        ("0.5", (0.0, 0.0)),
    ],
)
def test_geometry_is_right_in_the_last_box_and_has_a_tenth_for_the_format(text: str, expected: tuple[float, float]) -> None:
    assert score([{"name": "geo3k", "weight": 1.0, "kwargs": {"format_score": 0.1}}], text, "1/2") == pytest.approx(expected)


def test_expressions_in_tags_are_compared_as_mathematics() -> None:
    rewards = [{"name": "math_expr", "weight": 1.0}]
    assert score(rewards, "<answer>\\frac{6}{12}</answer>", "0.5") == (1.0, 1.0)
    assert score(rewards, "<answer>x + 1</answer>", "0.5") == (0.0, 0.0)


def test_tags_and_boxes_are_found_in_linear_time() -> None:
    assert find_tagged("<a>1</a> <a>2</a>", "a") == "1</a> <a>2" and find_tagged("<a>" * 100_000, "a") is None


def test_marks_are_known_without_an_environment() -> None:
    marks = list_marks("vlm", {"rewards": [{"name": "format", "weight": 1.0}, {"name": "math_expr", "weight": 3.0}]})
    assert {name: mark.weight for name, mark in marks.items()} == {"format": 0.25, "math_expr": 0.75, "correct": 0.0}
    assert [name for name, mark in marks.items() if mark.accuracy] == ["correct"]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "there is no reward; set reward_functions to a list"),
        ([{"name": "format"}, {"name": "format"}], "name each once"),
        ([{"name": "format", "weight": 0.0}], "add up to 0 or less"),
        ([{"name": "exact"}], "rewards"),
        (
            [{"name": "format", "kwargs": {"answer_tga": "a"}}],
            "has no option 'answer_tga', did you mean|has no option 'answer_tga'",
        ),
        (
            [{"name": "geo3k", "kwargs": {"format_score": "0.1"}}],
            "the option format_score of the reward function geo3k is '0.1'; it is a float",
        ),
    ],
)
def test_rewards_that_cannot_be_are_refused(rewards: list[dict], message: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        make_environment("vlm", {"rewards": rewards})
