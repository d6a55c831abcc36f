"""What a worker of pytest-xdist takes next: a file at a time, in the order of collection, which ends with small ones."""

from __future__ import annotations

from typing import Any

from xdist.scheduler.loadscope import LoadScopeScheduling

# Files that use the same engine, or forks of the same server (``support.forks``), are one piece of work: a worker has its own of each.
TOGETHER = {
    "tests/loop/test_vllm_runs.py": "tests/unit/generation/vllm",
    "tests/unit/generation/vllm": "tests/unit/generation/vllm",
    "tests/extensions/megatron": "tests/extensions/megatron",
}


class FileByFile(LoadScopeScheduling):  # type: ignore[misc]
    def __init__(self, config: Any, log: Any) -> None:
        config.option.loadscopereorder = False  # by the number of tests: single tests that take long would come last
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        together = (piece for start, piece in TOGETHER.items() if file == start or file.startswith(f"{start}/"))
        return next(together, file)
