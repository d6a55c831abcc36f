"""The time line of samples: complete, without overlap, inside its bounds, and cut where a run goes back."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loop.fakes import Letters, make_run
from loop.tiny import tiny_tokenizer
from strop.environments.base import reward
from strop.extensions.watch import timeline, timeline_file
from strop.extensions.watch.timeline import MAX_SPANS, SampleSpan, SampleTimeline, tile
from strop.extensions.watch.timeline_file import read_timeline
from strop.monitoring.waits import wait_listeners, waiting
from strop.trainer.run import TrainOptions
from strop.trainer.train import train
from strop.types import Rollout, Task
from support.each import each


@dataclass(frozen=True, kw_only=True)
class SlowlyScored(Letters):
    @reward(weight=0.0)
    async def work(self, task: Task, rollout: Rollout) -> float:
        await asyncio.sleep(0.004)
        return 0.0


def run_with_timeline(folder: Path, staleness: int, steps: int = 4) -> list[dict[str, Any]]:
    options = TrainOptions(max_steps=steps, groups_per_step=2, max_staleness=staleness, val_period=2, val_at_start=True)
    latency = {"latency": lambda seed: 0.003 + 0.001 * (seed % 8)}
    run, _, tracker = make_run(tiny_tokenizer(), folder, options, environment=SlowlyScored(), validation=3, **latency)  # type: ignore[arg-type]
    run.listeners.attached[:] = [SampleTimeline(folder / "timeline.jsonl")]  # the fake learner drifts from the sampler
    asyncio.run(train(run))
    asyncio.run(run.listeners.on_end(tracker))  # type: ignore[arg-type]
    assert not wait_listeners and not run.listeners.detached
    return list(read_timeline(folder / "timeline.jsonl", count=100)["steps"])


@each("staleness", [0, 1])
def test_each_sample_of_a_step_has_all_that_it_waited_for(tmp_path: Path, staleness: int) -> None:
    lines = run_with_timeline(tmp_path, staleness)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [sorted(group["group"] for group in line["groups"]) for line in lines] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for line in lines:
        window, ends = 1000 * line["seconds"] + 1, {}
        assert line["phases"] and line["more"] == line["lost"] == 0
        for group in line["groups"]:
            assert list(group["samples"]) == ["0", "1", "2", "3"] and group["kept"]
            for sample, spans in group["samples"].items():
                assert [label for label, _, _ in spans] == ["engine 1", "rewards"]
                edges = [group["from"], *(edge for _, *span in spans for edge in span), group["to"]]
                assert edges == sorted(edges) and edges[-1] <= window
                ends[group["group"], int(sample)] = spans[-1][2]
        last = tuple(line["last"][:2])
        assert ends[last] == line["last"][2] == max(ends.values()) and min(ends.values()) <= line["median"] <= ends[last]
        assert sum(line["seconds_of"].values()) == pytest.approx(
            sum(4 * (max(line["collected"], group["to"]) - group["from"]) for group in line["groups"]) / 1000, rel=0.1, abs=0.02
        )
    early = [group["from"] < 0 for line in lines[1:] for group in line["groups"]]
    assert all(early) if staleness else not any(early)  # those of an asynchronous run began in the step before


def test_the_later_of_two_spans_is_on_top(tmp_path: Path) -> None:
    agent = SampleSpan(0.0, 10.0, "environment agent")
    requests = [
        SampleSpan(2.0, 4.0, "engine request 1"),
        SampleSpan(3.0, 6.0, "engine request 2"),
        SampleSpan(8.0, 9.0, "engine request 3"),
    ]
    assert [(span.began, span.ended, span.label[-1]) for span in tile([agent, *requests])] == [
        (0, 2, "t"), (2, 3, "1"), (3, 6, "2"), (6, 8, "t"), (8, 9, "3"), (9, 10, "t"),
    ]  # fmt: skip


def test_memory_and_lines_have_their_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "SHORTEST", 0.0)
    monkeypatch.setattr(timeline, "MAX_KEPT", 50)
    monkeypatch.setattr(timeline, "MAX_SAMPLES", 5)
    listener = SampleTimeline(tmp_path / "timeline.jsonl")
    monkeypatch.setattr("strop.monitoring.waits.wait_listeners", [listener.hear])
    for index in range(20):
        with waiting("generation", on=f"group {index}"):
            for sample in range(4):
                with waiting(f"sample {sample}", on="engine, turn 1", kind="generation"):
                    pass
    assert listener._kept == 50 and listener._lost == 30
    groups = [listener._take(number, dict.fromkeys(range(3), True)) for number in list(listener._groups)]
    line = listener._describe(
        1, time.monotonic() - 1, time.monotonic(), [group for group in groups if group], {0: True, 1: False, 2: True}
    )
    assert line["more"] == 7 and sum(len(group["samples"]) for group in line["groups"]) == 5
    assert listener._kept == 50 - 12 and line["lost"] == 30
    monkeypatch.setattr(timeline, "MAX_SAMPLES", 256)
    many = timeline.GroupWaits(
        0, 1.0, 9.0, [(each % 300, SampleSpan(1 + each / 1e5, 1 + (each + 0.9) / 1e5, "engine 1")) for each in range(60_000)]
    )
    shown = timeline.take_shown([(many, many.tile())])[0][1]
    assert len(shown) == MAX_SPANS // 200


def test_a_run_that_goes_back_cuts_its_time_line(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    empty = dict.fromkeys(timeline_file._KEYS, 0)
    lines = [json.dumps({"step": step, **empty}, separators=(",", ":")) + "\n" for step in range(1, 6)]
    path.write_text("".join(lines) + '{"step":6,"gr')
    assert read_timeline(path) == {"first": 1, "last": 5, "steps": [{"step": 5, **empty}]}
    listener = SampleTimeline(path)
    asyncio.run(listener.on_start(3, None))  # type: ignore[arg-type]
    asyncio.run(listener.on_end())
    assert path.read_text() == "".join(lines[:3])
    assert [line["step"] for line in read_timeline(path, 2, 2)["steps"]] == [1, 2]
