"""Math problems with a reference answer, checked with math-verify or by exact match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strop.environments.answers import extract_final_answer, extract_last_boxed, is_integer, normalize_answer
from strop.environments.base import DatasetEnvironment, EnvironmentConfigError, PromptedTask, reward
from strop.environments.sandbox.scoring_pool import ScoringResult, get_scoring_pool
from strop.types import Rollout


@dataclass(frozen=True, kw_only=True)
class MathEnvironment(DatasetEnvironment):
    """The answer is the last ``\\boxed{...}`` of the last turn, else the last expression in it."""

    verifier: Literal["math_verify", "exact"] = "math_verify"  # exact: equal after normalizing notation and fractions
    num_workers: int = 4  # math-verify processes, started on demand
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
        answer = extract_final_answer(rollout.text)
        return normalize_answer(answer) if answer else None

    async def _verify(self, reference: str, text: str) -> ScoringResult:
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
        pool = get_scoring_pool(self.num_workers)
        return await pool.call("math_verify", self.timeout_s, reference=reference, answer=answer)
