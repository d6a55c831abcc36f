"""Math problems and multiple-choice questions with a reference answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strop.environments.answers import extract_final_answer, extract_last_boxed, is_integer, normalize_answer
from strop.environments.base import DatasetEnvironment, EnvironmentConfigError, PromptedTask, reward
from strop.environments.multiple_choice import CHOICE_EXTRACTORS, remove_markup
from strop.environments.scoring.dapo_verifier import LAST_CHARACTERS, NO_ANSWER, extract_dapo_answer
from strop.environments.scoring.scoring_pool import ScoringResult, get_scoring_pool
from strop.types import Rollout


@dataclass(frozen=True, kw_only=True)
class MathEnvironment(DatasetEnvironment):
    """The answer is the last ``\\boxed{...}`` of the last turn, else the last expression in it; ``verifier`` compares it.

    exact: equal after normalizing notation and fractions. dapo: what follows the last "Answer:", equal after DAPO's normalization.
    english_multichoice, multilingual_multichoice: the letter that follows "Answer:", or its translations.
    """

    verifier: Literal["math_verify", "exact", "dapo", "english_multichoice", "multilingual_multichoice"] = "math_verify"
    num_workers: int = 4  # processes that check answers, started on demand
    timeout_s: float = 5.0  # CPU seconds to check one answer; an answer that needs more counts as wrong

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers < 1:
            raise EnvironmentConfigError(f"num_workers is {self.num_workers}; it must be at least 1")
        if self.timeout_s <= 0:
            raise EnvironmentConfigError(f"timeout_s is {self.timeout_s}; it must be positive")

    @reward(weight=1.0, accuracy=True)
    async def correct(self, task: PromptedTask, rollout: Rollout) -> float:
        return (await self._verify(task.answer, rollout.text)).value or 0.0

    @reward(weight=0.0)
    async def unverified(self, task: PromptedTask, rollout: Rollout) -> bool:
        """1 if the answer could not be checked within the limits and counts as wrong."""
        return (await self._verify(task.answer, rollout.text)).failure is not None

    def answer_key(self, task: PromptedTask, rollout: Rollout) -> str | None:
        if self.verifier == "dapo":
            stated = extract_dapo_answer(rollout.text)
            return None if stated == NO_ANSWER else stated
        if extract_choice := CHOICE_EXTRACTORS.get(self.verifier):
            return extract_choice(rollout.text)
        answer = extract_final_answer(rollout.text)
        return normalize_answer(answer) if answer else None

    async def _verify(self, reference: str, text: str) -> ScoringResult:
        pool = get_scoring_pool(self.num_workers)
        if self.verifier == "dapo":
            return await pool.call("dapo", self.timeout_s, reference=reference, answer=text[-LAST_CHARACTERS:])
        if extract_choice := CHOICE_EXTRACTORS.get(self.verifier):
            expected = remove_markup(reference) if self.verifier == "english_multichoice" else reference
            return ScoringResult(float(extract_choice(text) == expected))
        boxed = extract_last_boxed(text)
        answer = extract_final_answer(text) if self.verifier == "exact" else boxed
        expected = normalize_answer(reference)
        if answer is not None:
            normalized = normalize_answer(answer)
            both_integers = is_integer(normalized) and is_integer(expected)  # integers need no symbolic comparison
            if not normalized or normalized == expected or both_integers or self.verifier == "exact":
                return ScoringResult(float(bool(normalized) and normalized == expected))
        elif self.verifier == "exact":
            return ScoringResult(0.0)
        answer = text if boxed is None else f"\\boxed{{{boxed}}}"  # one box: math-verify would read several as a set
        return await pool.call("math_verify", self.timeout_s, reference=reference, answer=answer)
