"""Two judges, or one that is asked twice, disagree."""

from __future__ import annotations

from typing import ClassVar

from strop.monitoring.hacking.base import HackingDetector, Reading
from strop.monitoring.hacking.watched_rollout import WatchedStep


class JudgesDetector(HackingDetector):
    """Reads the difference of the two grades, in [0, 1], of the graded rollouts."""

    name: ClassVar[str] = "judges"
    meaning: ClassVar[str] = (
        "judges differ by {value:.2f} in the mean (expected: at most {bound:.2f}), so their grades say little"
    )
    bound: ClassVar[float] = 0.3

    def read(self, step: WatchedStep) -> Reading | None:
        judged = [(min(abs(each.judged[0] - each.judged[1]), 1.0), each.name) for each in step.graded if each.judged is not None]
        ranked = sorted(judged, key=lambda pair: -pair[0])
        return Reading([difference for difference, _ in judged], shown=[name for _, name in ranked]) if judged else None
