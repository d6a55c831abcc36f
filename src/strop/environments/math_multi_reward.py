"""Problems with an integer as the answer, in tags: three rewards, for algorithms such as GDPO that normalize each of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from strop.environments.base import DatasetEnvironment, PromptedTask, reward
from strop.types import Rollout

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
