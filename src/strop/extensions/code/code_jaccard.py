"""How much of a reference program's text a reply has: NeMo-RL's ``code_jaccard``. Nothing is run."""

from __future__ import annotations

from dataclasses import dataclass

from strop.environments.base import DatasetEnvironment, PromptedTask, reward
from strop.types import Rollout


@dataclass(frozen=True, kw_only=True)
class CodeJaccard(DatasetEnvironment):
    """Words that reply and reference share, over the words of both, times the ratio of their lengths."""

    @reward(weight=1.0, accuracy=True)
    def similarity(self, task: PromptedTask, rollout: Rollout) -> float:
        return compare_words("".join(turn.text for turn in rollout.policy_turns), task.answer)

    @reward(weight=0.0)
    def aligned(self, task: PromptedTask, rollout: Rollout) -> bool:
        return self.similarity(task, rollout) > 0.5

    @reward(weight=0.0)
    def highly_aligned(self, task: PromptedTask, rollout: Rollout) -> bool:
        return self.similarity(task, rollout) > 0.8


def compare_words(reply: str, reference: str) -> float:
    """Return a number from 0 to 1. Words are divided by white space; case does not count."""
    found, expected = reply.strip().lower(), reference.strip().lower()
    if found == expected:
        return 1.0
    first, second = set(found.split()), set(expected.split())
    if not second:
        return 0.0
    return len(first & second) / len(first | second) * min(len(found), len(expected)) / max(len(found), len(expected))
