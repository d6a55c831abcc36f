"""Profiles of steps: spans nest, clocks are aligned within what is stated, and the file keeps the trace-event format."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from strop.base_config import validate_section
from strop.extensions.profiling.profile_config import ProfileConfig
from strop.extensions.profiling.step_profiler import (
    ClockOffset,
    ProcessSpans,
    StepProfiler,
    exchange_clocks,
    make_trace,
    record_wait,
    split_lanes,
)
from strop.monitoring import process_profile, waits
from strop.monitoring.process_profile import RECORDER, OperatorTrace, RecordedSpans, Span, SpanRecorder, control_profile
from strop.monitoring.waits import waiting
from strop.trainer.listeners import StepTimer
from support.traces import check_trace, read_trace, sum_phases


def test_nothing_is_kept_while_nothing_is_recorded() -> None:
    recorder = SpanRecorder()
    with recorder.span("learner", "forward"):
        pass
    recorder.add("learner", "step", 0.0, 1.0)
    assert not recorder.is_recording and recorder.end() == RecordedSpans([], 0)
    with waiting("sample 3", on="engine, turn 1", kind="generation"):
        pass
    assert RECORDER.end().spans == []


def test_spans_of_all_threads_are_kept_and_those_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = SpanRecorder()
    monkeypatch.setattr(process_profile, "MAX_SPANS", 5)
    recorder.begin()
    threads = [threading.Thread(target=lambda: recorder.add("a", "b", 0.0, 1.0)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans, lost, _ = recorder.end()
    assert len(spans) == 5 and lost == 3


def test_waits_are_spans_of_the_rows_they_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "wait_listeners", [record_wait])
    RECORDER.begin()
    with (
        waiting("training loop", on="generation"),
        waiting("generation", on="group 87", detail="task 5"),
        waiting("sample 3", on="engine, turn 1", kind="generation"),
    ):
        time.sleep(0.01)
    with waiting("sample 3", on="environment 'sandbox', scoring", kind="environment"):
        pass
    with waiting("weight sync", on="engine 1 to take version 4", kind="weight_sync"):
        pass
    spans, _, _ = RECORDER.end()
    assert [(span.track, span.name) for span in spans] == [
        ("requests to engines", "sample 3: engine, turn 1"), ("groups", "generation: group 87"),
        ("environments", "sample 3: environment 'sandbox', scoring"), ("weight sync", "weight sync: engine 1 to take version 4"),
    ]  # fmt: skip
    assert 0.009 < spans[0].ended - spans[0].started < spans[1].ended - spans[1].started + 1e-9


def test_spans_of_a_row_nest_or_are_apart() -> None:
    drawn = random.Random(0)
    spans = [Span("a", str(number), (start := drawn.random()), start + drawn.random() / 5) for number in range(300)]
    rows = split_lanes(spans)
    assert sorted(span for row in rows for span in row) == sorted(spans)
    for row in rows:
        for index, span in enumerate(row):
            for later in row[index + 1 :]:
                assert later.started >= span.ended or later.ended <= span.ended
    assert len(split_lanes([Span("a", "x", 0, 10), Span("a", "y", 1, 2), Span("a", "z", 2, 3)])) == 1


def test_the_offset_of_a_clock_is_found_within_the_stated_error() -> None:
    drawn = random.Random(1)

    async def read_other() -> float:
        await asyncio.sleep(drawn.random() * 0.004)  # on the way there
        read = time.perf_counter() + 1234.5
        await asyncio.sleep(drawn.random() * 0.004)
        return read

    for _ in range(5):
        found = asyncio.run(exchange_clocks(read_other))
        assert abs(found.offset + 1234.5) <= found.error < 0.05


def test_processes_with_other_clocks_are_on_one_time_line() -> None:
    began = 100.0
    driver = ProcessSpans(name="driver", pid=1, spans=[Span("training loop", "generation", 100.5, 101.5)])
    engine = ProcessSpans(
        name="engine-0", pid=2, address="node", 
        spans=[Span("calls", "generate", 5000.6, 5001.4), Span("calls", "generate", 5000.7, 5001.45)],
        clock=ClockOffset(-4900.0, 1e-4), lost=2,
    )  # fmt: skip
    trace = make_trace(3, began, 102.0, [driver, engine])
    spans = check_trace(trace)
    assert {(span.process, span.thread, span.name, span.ts, span.dur) for span in spans} == {
        ("driver", "training loop", "generation", 500000.0, 1e6),
        ("engine-0", "calls 1", "generate", 600000.0, 800000.0), ("engine-0", "calls 2", "generate", 700000.0, 750000.0),
    }  # fmt: skip
    said = trace["otherData"]["processes"]["engine-0"]
    assert said == {"spans": 2, "lost": 2, "clock_offset_seconds": -4900.0, "clock_error_seconds": 1e-4}


class FakeProcess:
    """Another process, whose clock is ahead, in this one."""

    def __init__(self, name: str, ahead: float = 50.0, fails: str = "") -> None:
        self.name, self.pid, self.address, self.ahead, self.fails = name, 7, "node", ahead, fails
        self.recorder = SpanRecorder()

    async def control_profile(self, what: str, operators: bool = False) -> Any:
        if what == self.fails:
            raise ConnectionError("it died")
        if what == "clock":
            return time.perf_counter() + self.ahead
        if what == "begin":
            self.recorder.begin()
            return ""
        now = time.perf_counter() + self.ahead
        self.recorder.add("calls", "step", now - 0.001, now)
        return self.recorder.end()


def profile_steps(
    folder: Path, processes: list[FakeProcess], steps: tuple[int, ...] = (2,), **options: Any
) -> tuple[list[str], dict[str, float]]:
    """Profile three steps of two phases. Return the notes, and what the timer logged of step 2."""
    notes: list[str] = []
    logged: dict[int, dict[str, float]] = {}

    async def run() -> None:
        profiler = StepProfiler(folder=folder, steps=frozenset(steps), note=notes.append, processes=lambda: processes)
        timer = StepTimer()
        for step in (1, 2, 3):
            await profiler.begin(step)
            timer.start_step()
            with timer.span("generation"), waiting("sample 0", on="engine, turn 1", kind="generation"):
                await asyncio.sleep(0.004)
            for _ in range(3):
                with timer.span("policy_training"), RECORDER.span("learner", "forward"):
                    await asyncio.sleep(0.002)
            logged[step] = timer.metrics(tokens_read=1, tokens_sampled=1)
            await profiler.finish(step, timer.started, timer.ended)
        profiler.close()

    asyncio.run(run())
    return notes, logged[2]


def test_one_file_a_step_whose_phases_sum_to_the_logged_times(tmp_path: Path) -> None:
    notes, logged = profile_steps(tmp_path, [FakeProcess("learner-0"), FakeProcess("engine-0", ahead=-3e5)])
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["step_000002.json.gz"]
    trace = read_trace(tmp_path / "profiles" / "step_000002.json.gz")
    spans = check_trace(trace)
    phases = {name: logged[f"timing/train/{name}"] for name in ("generation", "policy_training")}
    assert sum_phases(spans) == pytest.approx(phases, abs=1e-8)
    assert trace["otherData"]["seconds"] == pytest.approx(logged["timing/train/total_step_time"], abs=1e-9)
    assert {span.process for span in spans} == {"driver", "learner-0", "engine-0"}
    end = 1e6 * trace["otherData"]["seconds"]
    assert all(0 <= span.ts <= end + 1e5 for span in spans)
    (note,) = notes
    assert note.startswith("profile of step 2: ") and "clocks of 2 other processes within " in note


def test_a_process_that_dies_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    profile_steps(tmp_path, [FakeProcess("engine-0", fails="clock"), FakeProcess("engine-1", fails="end")])
    said = read_trace(tmp_path / "profiles" / "step_000002.json.gz")["otherData"]["processes"]
    assert said["engine-0"]["note"] == said["engine-1"]["note"] == "not recorded: ConnectionError: it died"


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("a file")
    notes, _ = profile_steps(tmp_path, [])
    assert notes[0].startswith("warning: the profile of step 2 is not written: ")


def test_operators_of_all_threads_are_inside_the_spans_that_ran_them(tmp_path: Path) -> None:
    import torch

    began = time.perf_counter()
    assert control_profile("begin", True) == ""
    values = torch.ones(64, 64)
    with RECORDER.span("learner", "here"):
        values @ values
    thread = threading.Thread(target=lambda: values.cumsum(0))
    thread.start()
    thread.join()
    recorded = control_profile("end")
    ended = time.perf_counter()
    spans = check_trace(
        make_trace(1, began, ended, [ProcessSpans(name="driver", spans=recorded.spans, operators=recorded.operators)])
    )
    (here,) = [span for span in spans if span.name == "here"]
    (product,) = [span for span in spans if span.name == "aten::mm"]
    (summed,) = [span for span in spans if span.name == "aten::cumsum"]
    assert here.ts - 50 <= product.ts and product.ts + product.dur <= here.ts + here.dur + 50  # microseconds
    assert summed.thread != product.thread and product.thread.startswith("torch, thread ")
    assert not [span for span in spans if span.name == "strop clock"]


def test_a_second_profiler_of_a_process_is_a_sentence_and_not_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: OperatorTrace) -> None:
        raise RuntimeError("a profiler is active")

    monkeypatch.setattr(OperatorTrace, "begin", refuse)
    assert control_profile("begin", True) == "torch's operators are not recorded: a profiler is active"
    assert control_profile("end").operators is None


@pytest.mark.parametrize(
    ("values", "key"),
    [({"steps": [0]}, "steps"), ({"steps": list(range(1, 60))}, "steps"), ({"operators": True}, "operators")],
    ids=["zero", "many", "no steps"],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, Any], key: str) -> None:
    problems = list(validate_section(ProfileConfig, values).errors("logger.profile"))
    assert [problem.key for problem in problems] == [f"logger.profile.{key}"]
    assert not list(validate_section(ProfileConfig, {"steps": [3, 4], "operators": True}).errors("logger.profile"))


def test_operators_that_overlap_are_on_rows_of_their_own_and_those_of_other_times_are_left_out() -> None:
    events = [
        {"name": "mm", "cat": "cpu_op", "ts": 100.0001e6, "dur": 100.0, "tid": 5},
        {"name": "inner", "cat": "cpu_op", "ts": 100.0001e6 + 20, "dur": 80.0, "tid": 5},
        {"name": "gloo:recv", "cat": "user_annotation", "ts": 100.0001e6 + 50, "dur": 500.0, "tid": 5},
        {"name": "earlier", "cat": "cpu_op", "ts": 99e6, "dur": 1.0, "tid": 5},
    ]
    trace = make_trace(1, 100.0, 101.0, [ProcessSpans(name="learner-0", operators=json.dumps(events))])
    rows = {(span.thread, span.name) for span in check_trace(trace)}
    assert rows == {("torch, thread 5, 1", "mm"), ("torch, thread 5, 1", "inner"), ("torch, thread 5, 2", "gloo:recv")}
