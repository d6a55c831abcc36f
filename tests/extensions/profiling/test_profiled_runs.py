"""Profiles of whole runs: every role is on the time line, and the phases sum to what the run logged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loop.runs import Outcome, metrics_of, overrides, start, tiny_config
from support.traces import TraceSpan, check_trace, read_trace, sum_phases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHORT = {"logger.console": "plain", "checkpointing.enabled": False, "grpo.max_num_steps": 3, "logger.profile.steps": [2, 3]}


def run(model: Path, folder: Path, **changes: Any) -> Outcome:
    done = start(["grpo", *overrides({**tiny_config(model), **SHORT, **changes})], folder).finish(500)
    assert done.code == 0, done.err
    return done


def read(folder: Path, step: int) -> tuple[list[TraceSpan], Mapping[str, Any]]:
    """Return the spans of a step and what the file says of its processes; the phases are those that were logged."""
    trace = read_trace(folder / "logs" / "profiles" / f"step_{step:06d}.json.gz")
    spans, logged = check_trace(trace), metrics_of(folder / "logs")[step]
    names = {name.removeprefix("timing/train/"): value for name, value in logged.items() if name.startswith("timing/train/")}
    total = names.pop("total_step_time")
    assert sum_phases(spans) == pytest.approx({name: names[name] for name in sum_phases(spans)}, abs=1e-7)
    assert set(names) - set(sum_phases(spans)) <= {"offload"}
    assert trace["otherData"]["seconds"] == pytest.approx(total, abs=1e-9)
    return spans, trace["otherData"]["processes"]


def find(spans: list[TraceSpan], process: str, thread: str) -> set[str]:
    return {span.name for span in spans if span.process == process and span.thread.startswith(thread)}


def test_a_run_in_one_process_shows_its_loop_its_learner_its_engine_and_its_environments(tiny: Path, tmp_path: Path) -> None:
    done = run(tiny, tmp_path, **{"logger.profile.operators": True})
    assert done.out.count("profile of step ") == 2 and len(list((tmp_path / "logs" / "profiles").glob("*.json.gz"))) == 2
    spans, _ = read(tmp_path, 3)
    assert {"forward_backward", "step", "forward"} <= find(spans, "driver", "learner")
    assert find(spans, "driver", "engine") == {"prefill", "decode"}
    assert any(name == "sample 3: engine, turn 1" for name in find(spans, "driver", "requests to engines"))
    assert any("environment " in name for name in find(spans, "driver", "environments"))
    assert any(name.startswith("aten::") for name in find(spans, "driver", "torch, thread"))


@pytest.mark.exhaustive
def test_a_run_over_ray_shows_every_process_on_one_time_line(tiny: Path, tmp_path: Path) -> None:
    """All processes are on one machine here, where their clocks are one: what is found of them must be within the stated error."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    ray = {"cluster.backend": "ray", "cluster.gpus_per_node": 2, "cluster.environment_hosts": 1}
    run(tiny, tmp_path, **ray, **{"logger.profile.operators": True})
    for step in (2, 3):
        spans, processes = read(tmp_path, step)
        assert set(processes) == {"driver", "learner-0", "learner-1", "engine-0", "environment-arithmetic-0"}
        assert {span.process for span in spans} == set(processes)
        for said in processes.values():
            assert abs(said["clock_offset_seconds"]) <= said["clock_error_seconds"] < 0.1 or said["clock_error_seconds"] == 0
            assert said["lost"] == 0 and "note" not in said
        training = next(span for span in spans if span.process == "driver" and span.name == "policy_training")
        slack = 1e6 * max(said["clock_error_seconds"] for said in processes.values())
        for rank in ("learner-0", "learner-1"):
            assert {"forward_backward", "step"} <= find(spans, rank, "calls") and "forward" in find(spans, rank, "learner")
            for span in spans:
                if span.process == rank and span.name in (
                    "forward_backward",
                    "step",
                ):  # inside the phase of the driver that asked for it
                    assert training.ts - slack <= span.ts and span.ts + span.dur <= training.ts + training.dur + slack
        assert "generate" in find(spans, "engine-0", "calls") and "decode" in find(spans, "engine-0", "engine")
