"""What a worker of pytest-xdist takes next: a file at a time, the long ones first."""

from __future__ import annotations

from typing import Any

from xdist.scheduler.loadscope import LoadScopeScheduling

# Files that take more than ten seconds, the longest first: one that is begun late keeps the other workers waiting.
LONGEST: list[str] = []

# Files that use the same engine are one piece of work.
TOGETHER = {
    "tests/unit/generation/vllm/test_vllm_weights.py": "tests/unit/generation/vllm/test_vllm_engine.py",
    "tests/unit/generation/vllm/test_repairs.py": "tests/unit/generation/vllm/test_vllm_engine.py",
}

# Files whose tests share nothing that takes long to make: a test at a time.
DIVIDED: set[str] = set()

PLACES = {file: place for place, file in enumerate(LONGEST)}


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return nodeid if file in DIVIDED else TOGETHER.get(file, file)

    def _assign_work_unit(self, node: Any) -> None:
        longest = min(self.workqueue, key=lambda scope: PLACES.get(scope.split("::", 1)[0], len(PLACES)))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
