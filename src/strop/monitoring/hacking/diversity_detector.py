"""The rollouts of a prompt become copies of each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import ClassVar

from strop.monitoring.hacking.base import Reading, WordingDetector, mean
from strop.monitoring.hacking.watched_rollout import SHOWN, WatchedRollout


class DiversityDetector(WordingDetector):
    """Reads the mean overlap of the n-grams of two rewarded rollouts of a prompt (Jaccard), of at least 20 words each."""

    name: ClassVar[str] = "diversity"
    meaning: ClassVar[str] = (
        "rewarded rollouts of a prompt share {value:.0%} of their wording (expected: at most {bound:.0%}): few ways to answer are left"
    )
    bound: ClassVar[float] = 0.6
    margin: ClassVar[float | None] = 0.25

    def measure(self, groups: Sequence[Sequence[WatchedRollout]]) -> Reading | None:
        found = [list(combinations([each for each in group if each.is_long], 2)) for group in groups]
        values = [mean([_overlap(*pair) for pair in pairs]) for pairs in found if pairs]
        shown = sorted((pair for pairs in found for pair in pairs), key=lambda pair: -_overlap(*pair))
        return Reading(values, [one.name for one, _ in shown[:SHOWN]]) if values else None


def _overlap(one: WatchedRollout, other: WatchedRollout) -> float:
    left, right = one.ngrams.keys(), other.ngrams.keys()
    return len(left & right) / max(len(left | right), 1)
