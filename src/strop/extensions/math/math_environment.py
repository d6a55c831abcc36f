"""Math problems and multiple-choice questions with a reference answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from strop.environments.base import DatasetEnvironment, EnvironmentConfigError, PromptedTask, reward
from strop.environments.scoring.scoring_pool import ScoringResult
from strop.extensions.math.math_verifier import MathMethod, find_math_answer, verify_math
from strop.types import Rollout


@dataclass(frozen=True, kw_only=True)
class MathEnvironment(DatasetEnvironment):
    """The answer is the last ``\\boxed{...}`` of the last turn, else the last expression in it; ``verifier`` compares it.

    exact: equal after normalizing notation and fractions. dapo: the text after the last "Answer:", equal after DAPO's
    normalization. multilingual: like math_verify, with digits of any script, after "Answer:" or its translations. boxed,
    olympiad, minerva: only the last box, compared as is usual for the data sets of these names. number: of the box, "####" or
    "answer is". strict_multichoice: the option stated last, and nothing else with it. english_multichoice,
    multilingual_multichoice: the letter that follows "Answer:", or its translations.
    """

    verifier: MathMethod = "math_verify"
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
        return (await self._verify(task, rollout.content)).value or 0.0

    @reward(weight=0.0)
    async def unverified(self, task: PromptedTask, rollout: Rollout) -> bool:
        """1 if the answer could not be checked within the limits and counts as wrong."""
        return (await self._verify(task, rollout.content)).failure is not None

    def answer_key(self, task: PromptedTask, rollout: Rollout) -> str | None:
        return find_math_answer(self.verifier, rollout.content, task.metadata)

    async def _verify(self, task: PromptedTask, text: str) -> ScoringResult:
        workers, limit = self.num_workers, self.timeout_s
        return await verify_math(self.verifier, task.answer, text, task.metadata, num_workers=workers, timeout_s=limit)


_FORMAT = re.compile(r"^<think>.*?</think>\n<answer>.*?</answer>$", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class MathMultiReward(DatasetEnvironment):
    """The answer is the content of the last ``<answer>``, otherwise the whole turn. It must equal the reference as text."""

    num_workers: int = 1  # a NeMo-RL option without effect; no other process is needed

    @reward(weight=1.0, accuracy=True)
    def correctness(self, task: PromptedTask, rollout: Rollout) -> bool:
        return extract_xml_answer(rollout.content) == task.answer

    @reward(weight=1.0)
    def integer(self, task: PromptedTask, rollout: Rollout) -> bool:
        return extract_xml_answer(rollout.content).isdigit()

    @reward(weight=1.0)
    def format(self, task: PromptedTask, rollout: Rollout) -> bool:
        """Whether the turn is one thought and one answer, and nothing else."""
        text = rollout.opening + rollout.text
        return text.count("<answer>") == 1 == text.count("</answer>") and _FORMAT.search(text) is not None

    def answer_key(self, task: PromptedTask, rollout: Rollout) -> str | None:
        return extract_xml_answer(rollout.content) or None


def extract_xml_answer(text: str) -> str:
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()
