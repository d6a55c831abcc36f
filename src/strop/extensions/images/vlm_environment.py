"""Questions, with or without images, with answers in tags: NeMo-RL's environment ``vlm``."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from strop.environments.answers import extract_last_boxed
from strop.environments.base import DatasetEnvironment, EnvironmentConfigError, PromptedTask
from strop.environments.rewards import RewardFunction, RewardMark
from strop.environments.scoring.scoring_pool import ScoringResult
from strop.extensions.math.math_verifier import verify_math
from strop.thoughts import read_answer
from strop.types import Rollout
from strop.user_code import suggest_names

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
    one (1902.09630), which is also defined for disjoint boxes.
    """
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


CORRECT = "correct"  # the reward of weight 0 for the correctness of the answer


@dataclass(frozen=True)
class WeightedReward:
    """A reward function by its name, with its share of the reward."""

    name: Literal["format", "exact_alnum", "math_expr", "bbox_giou", "geo3k"]
    weight: float = 1.0
    kwargs: dict[str, Any] | None = field(default=None, hash=False)


@dataclass(frozen=True, kw_only=True)
class VlmEnvironment(DatasetEnvironment):
    """The reward is the mean of ``rewards``, by their weights; ``correct``, with weight 0, is the accuracy: all functions that
    check correctness find the answer right.

    format: thoughts in <think> (0.25) and an answer in <answer> (0.75). exact_alnum: the answer has the letters and digits of the
    reference. math_expr: it is the same expression. bbox_giou: the overlap of boxes. geo3k: the last \\boxed is right, after </think>.
    """

    rewards: tuple[WeightedReward, ...] = ()  # reward_functions in NeMo-RL
    num_workers: int = 4  # processes that compare expressions, started on demand
    timeout_s: float = 5.0  # CPU seconds per comparison; answers that need more count as wrong

    def __post_init__(self) -> None:
        if not self.rewards:
            raise EnvironmentConfigError(
                f"there is no reward; set reward_functions to a list of {{name, weight}}, with names from {', '.join(OPTIONS)}"
            )
        names = [each.name for each in self.rewards]
        if len(set(names)) < len(names):
            raise EnvironmentConfigError(
                f"reward_functions names {', '.join(names)}; name each once, with the sum of its weights"
            )
        if not sum(each.weight for each in self.rewards) > 0:
            raise EnvironmentConfigError("the weights of reward_functions add up to 0 or less; the reward is a mean by them")
        for each in self.rewards:
            _check_options(each)
        if self.num_workers < 1 or self.timeout_s <= 0:
            raise EnvironmentConfigError(
                f"num_workers is {self.num_workers} and timeout_s is {self.timeout_s}; both must be positive"
            )
        super().__post_init__()

    @cached_property
    def reward_functions(self) -> Mapping[str, RewardFunction]:
        total = sum(each.weight for each in self.rewards)
        kind = type(self).__name__
        made: dict[str, RewardFunction] = {
            each.name: RewardFunction(self._read_value(each), RewardMark(each.weight / total), f"{kind}.{each.name}")
            for each in self.rewards
        }
        return {**made, CORRECT: RewardFunction(self._is_correct, RewardMark(0.0, accuracy=True), f"{kind}.{CORRECT}")}

    @classmethod
    def list_marks(cls, options: Mapping[str, Any]) -> Mapping[str, RewardMark]:
        given = options.get("rewards") or ()
        made = cls(rewards=tuple(each if isinstance(each, WeightedReward) else WeightedReward(**each) for each in given))
        return {name: each.mark for name, each in made.reward_functions.items()}

    def answer_key(self, task: PromptedTask, rollout: Rollout) -> str | None:
        names = {each.name: each.kwargs or {} for each in self.rewards}
        tag = next((options.get("answer_tag") or options.get("tag") for options in names.values() if options), None) or "answer"
        return extract_last_boxed(rollout.content) if "geo3k" in names else find_tagged(rollout.content, tag)

    async def score(self, each: WeightedReward, reference: str, text: str) -> AnswerScore:
        """Return a reward function's score of a reply."""
        options = each.kwargs or {}
        match each.name:
            case "format":
                return score_format(text, **options)
            case "exact_alnum":
                return score_exact(reference, text, **options)
            case "bbox_giou":
                return score_box(reference, text, **options)
            case "math_expr":
                return await score_expression(reference, text, self._check_math, **options)
            case "geo3k":
                return await score_geometry(reference, text, self._check_math, **options)

    def _read_value(self, each: WeightedReward) -> Callable[[PromptedTask, Rollout], Awaitable[float]]:
        async def value(task: PromptedTask, rollout: Rollout) -> float:
            return (await self.score(each, task.answer, rollout.opening + rollout.text)).value

        return value

    async def _is_correct(self, task: PromptedTask, rollout: Rollout) -> bool:
        scores = [await self.score(each, task.answer, rollout.opening + rollout.text) for each in self.rewards]
        said = [each.correct for each in scores if each.correct is not None]
        return bool(said) and all(said)

    async def _check_math(self, reference: str, text: str) -> ScoringResult:
        return await verify_math("math_verify", reference, text, num_workers=self.num_workers, timeout_s=self.timeout_s)


def _check_options(reward: WeightedReward) -> None:
    """Raise EnvironmentConfigError for an option that a reward function does not have."""
    known = OPTIONS[reward.name]
    for option, value in (reward.kwargs or {}).items():
        if option not in known:
            raise EnvironmentConfigError(
                f"the reward function {reward.name} has no option {option!r}{suggest_names(str(option), known)}; it has {', '.join(known)}"
            )
        wanted = known[option]
        if isinstance(value, bool) or not isinstance(value, (int, float) if wanted is float else wanted):
            raise EnvironmentConfigError(
                f"the option {option} of the reward function {reward.name} is {value!r}; it is a {wanted.__name__}"
            )
