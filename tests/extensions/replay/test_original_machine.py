"""A replay computes with the threads that the step ran with."""

from __future__ import annotations

from pathlib import Path

import torch

from strop.config import GrpoRunConfig, load_config
from strop.extensions.replay.replay import find_start, keep_threads, use_threads
from strop.monitoring.run_starts import RunStart, record_run_start


def test_a_step_is_of_the_last_start_before_it(tmp_path: Path) -> None:
    assert find_start(tmp_path, 3).hardware == {}
    for after, threads in ((0, "1"), (4, "2"), (2, "3")):  # the run went back to step 2
        record_run_start(tmp_path, RunStart(after_step=after, hardware={"threads": threads}))
    assert [find_start(tmp_path, step).hardware["threads"] for step in (1, 2, 3, 6)] == ["1", "1", "3", "3"]


def test_the_threads_of_the_start_are_used_unless_the_configuration_says_how_many() -> None:
    before = torch.get_num_threads()
    free, fixed = (
        load_config(None, ["policy.model_name=x", f"policy.num_threads={value}"], root=GrpoRunConfig, check=False).config
        for value in ("null", "1")
    )
    start = RunStart(after_step=0, hardware={"threads": str(before + 1)})
    with keep_threads():
        use_threads(start, fixed)
        assert torch.get_num_threads() == before
        use_threads(RunStart(after_step=0), free)
        assert torch.get_num_threads() == before
        use_threads(start, free)
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
