"""Rewards for answers in tags, with the names and values of NeMo-RL (``env.NAME.reward_functions``).

Replies are untrusted: each function takes time linear in their length, and mathematical comparisons run in the scoring pool.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from strop.environments.answers import extract_last_boxed
from strop.environments.scoring.scoring_pool import ScoringResult
from strop.thoughts import read_answer

CheckMath = Callable[[str, str], Awaitable[ScoringResult]]
"""(reference, text with a boxed answer) -> whether they are equal."""

SMALLEST_AREA = 1e-3
GOOD_OVERLAP = 0.5  # overlap of boxes from which an answer counts as right


@dataclass(frozen=True)
class AnswerScore:
    value: float
    correct: bool | None = None  # None: the score does not tell whether the answer is right


NOTHING = AnswerScore(0.0, False)


def find_tagged(text: str, tag: str) -> str | None:
    """Return the text between the first ``<tag>`` and the last ``</tag>`` after it; None without them."""
    start = text.find(f"<{tag}>")
    end = text.rfind(f"</{tag}>")
    return text[start + len(tag) + 2 : end] if start >= 0 and start + len(tag) + 2 <= end else None


def find_answer(text: str, tag: str) -> str | None:
    """Return the text in the tags outside of the thoughts."""
    return find_tagged(read_answer(text), tag)


def score_format(text: str, think_tag: str = "think", answer_tag: str = "answer") -> AnswerScore:
    """0.25 for thoughts in tags, 0.75 for an answer in tags."""
    return AnswerScore(0.25 * (find_tagged(text, think_tag) is not None) + 0.75 * (find_tagged(text, answer_tag) is not None))


def score_exact(reference: str, text: str, answer_tag: str = "answer") -> AnswerScore:
    """1 if the answer has the same letters and digits as the reference, ignoring case."""
    answer = find_answer(text, answer_tag)
    right = answer is not None and _keep_alphanumeric(answer) == _keep_alphanumeric(reference)
    return AnswerScore(float(right), right)


def score_box(reference: str, text: str, giou_penalty_thres: float = 10.0, answer_tag: str = "answer") -> AnswerScore:
    """The overlap of two boxes [x1, y1, x2, y2], from -1 to 1: intersection over union, and below the threshold the generalized
    one (1902.09630), which is also defined for disjoint boxes."""
    answer = find_answer(text, answer_tag)
    expected, given = _parse_box(reference), None if answer is None else _parse_box(answer)
    if expected is None or given is None:
        return NOTHING
    inner = (max(expected[0], given[0]), max(expected[1], given[1]), min(expected[2], given[2]), min(expected[3], given[3]))
    outer = (min(expected[0], given[0]), min(expected[1], given[1]), max(expected[2], given[2]), max(expected[3], given[3]))
    intersection = max(0.0, inner[2] - inner[0]) * max(0.0, inner[3] - inner[1])
    union = max(SMALLEST_AREA, _area(expected) + _area(given) - intersection)
    overlap = intersection / union
    if overlap < giou_penalty_thres:
        hull = max(SMALLEST_AREA, _area(outer))
        overlap -= (hull - union) / hull
    return AnswerScore(overlap, overlap > GOOD_OVERLAP) if math.isfinite(overlap) else NOTHING


async def score_expression(reference: str, text: str, check: CheckMath, tag: str = "answer") -> AnswerScore:
    """1 if the answer is the same expression as the reference."""
    answer = find_answer(text, tag)
    right = answer is not None and bool((await check(reference, f"\\boxed{{{answer}}}")).value)
    return AnswerScore(float(right), right)


async def score_geometry(reference: str, text: str, check: CheckMath, format_score: float = 0.1) -> AnswerScore:
    """1 if the last boxed answer is right, and ``format_score`` of the score for a box after the end of the thoughts."""
    end = text.find("</think>")
    box = text.find("\\boxed{", end) if end >= 0 else -1
    is_formatted = box >= 0 and text.find("}", box) >= 0
    answer = extract_last_boxed(read_answer(text))
    right = answer is not None and bool((await check(reference, f"\\boxed{{{answer}}}")).value)
    return AnswerScore((1.0 - format_score) * right + format_score * is_formatted, right)


def _keep_alphanumeric(text: str) -> str:
    return "".join(each for each in text if each.isalnum()).lower()


def _parse_box(text: str) -> tuple[float, float, float, float] | None:
    parts = text.replace("[", "").replace("]", "").split(",", 4)
    try:
        x1, y1, x2, y2 = (float(part) for part in parts)
    except ValueError:
        return None
    return (x1, y1, x2, y2) if all(map(math.isfinite, (x1, y1, x2, y2))) else None


def _area(box: tuple[float, float, float, float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


OPTIONS: Mapping[str, Mapping[str, type]] = {  # of each reward function: kwargs -> type
    "format": {"think_tag": str, "answer_tag": str},
    "exact_alnum": {"answer_tag": str},
    "math_expr": {"tag": str},
    "bbox_giou": {"giou_penalty_thres": float, "answer_tag": str},
    "geo3k": {"format_score": float},
}
