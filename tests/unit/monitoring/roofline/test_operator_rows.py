"""Operators are counted once: nested ones are part of those around them, kernels of those that launched them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from strop.monitoring.profiling.process_profile import control_profile
from strop.monitoring.profiling.span_recorder import RECORDER
from strop.monitoring.roofline import operator_rows
from strop.monitoring.roofline.device_ceilings import DeviceCeilings
from strop.monitoring.roofline.operator_rows import TimedPass, list_rows

SQUARE = {"Input type": ["float", "float"], "Input Dims": [[4, 4], [4, 4]]}


def event(name: str, start: float, length: float, cat: str = "cpu_op", tid: int = 7, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "tid": tid, "args": args}


def seconds(rows: Any) -> dict[tuple[str, str], float]:
    return {(row.phase, row.name): round(1e6 * row.seconds, 6) for row in rows}


def test_an_operator_that_is_counted_has_all_of_its_time_and_any_other_what_nothing_inside_takes() -> None:
    events = [
        event("aten::linear", 0, 100),
        event("aten::t", 5, 10),
        event("aten::mm", 20, 70, **SQUARE),
        event("aten::mm", 30, 20, **SQUARE),  # as if it called itself
        event("aten::empty", 35, 5),
        event("aten::add", 100, 30, **SQUARE),
    ]
    rows = list_rows(events, 0.0, [])
    assert seconds(rows) == {("", "aten::mm"): 70, ("", "aten::add"): 30, ("", "views and dispatch"): 30}
    assert sum(row.seconds for row in rows) == pytest.approx(130e-6)
    (product,) = (row for row in rows if row.name == "aten::mm")
    assert (product.calls, product.flops, product.shapes) == (1, 128, "[4, 4] x [4, 4]")


def test_operators_belong_to_the_innermost_pass_of_their_thread() -> None:
    passes = [
        TimedPass("forward_backward", 1.0, 1.001, 7), TimedPass("backward", 1.0005, 1.001, 7),
        TimedPass("decode", 1.0006, 1.0007, 8), TimedPass("strop_decode", 1.0001, 1.0002, 7, is_kernel=True),
    ]  # fmt: skip
    events = [
        event("aten::mm", 600, 50, **SQUARE),
        event("aten::mm", 610, 20, tid=8, **SQUARE),
        event("aten::add", 2000, 9, **SQUARE),
    ]
    rows = list_rows(events, 1e6, passes)
    outside = "outside operators"
    assert seconds(rows) == {
        ("backward", "aten::mm"): 50, ("decode", "aten::mm"): 20, ("", "aten::add"): 9, ("forward_backward", "strop_decode"): 100,
        ("backward", outside): 450, ("forward_backward", outside): 400, ("decode", outside): 80,
    }  # fmt: skip


def test_a_thread_without_passes_finds_those_of_others() -> None:
    passes = [TimedPass("step", 1.0, 2.0, 7), TimedPass("backward", 1.2, 1.4, 7)]
    rows = list_rows([event("aten::mm", 1.3e6, 50, tid=9, **SQUARE), event("aten::mm", 1.5e6, 20, tid=9, **SQUARE)], 0.0, passes)
    assert seconds(rows) == {("backward", "aten::mm"): 50, ("step", "aten::mm"): 20}


def test_parts_of_known_functions_are_named_after_them_but_products_are_products() -> None:
    events = [event("_TiledLogprobs", 0, 100), event("aten::mm", 0, 40, **SQUARE), event("aten::exp", 50, 20, **SQUARE)]
    events += [
        event("_PieceAttentionBackward", 200, 100),
        event("aten::bmm", 210, 40, **{**SQUARE, "Input Dims": [[2, 4, 4]] * 2}),
    ]
    assert {(row.name, row.kind) for row in list_rows(events, 0.0, []) if row.counted} == {
        ("aten::mm", "matrix products"), ("aten::exp", "log-probabilities"), ("aten::bmm", "attention"),
    }  # fmt: skip


def test_on_a_gpu_time_is_that_of_the_kernels_of_an_operator_and_of_what_it_calls() -> None:
    """A made-up trace: no GPU has been seen by these tests."""
    events = [
        event("aten::linear", 0, 100, **{"External id": 1}),
        event("aten::addmm", 20, 70, **{"External id": 2}, **ADDMM),
        event("aten::copy_", 30, 5, **{"External id": 3}),
        event("cudaLaunchKernel", 60, 5, cat="cuda_runtime", **{"External id": 2}),
        event("gemm", 500, 900, cat="kernel", tid=0, **{"External id": 2}),
        event("bias", 1400, 30, cat="kernel", tid=0, **{"External id": 3}),
        event("nccl", 1500, 7, cat="kernel", tid=0),
    ]
    rows = list_rows(events, 0.0, [TimedPass("forward", 0.0, 100e-6, 7)])
    product = next(row for row in rows if row.name == "aten::addmm")
    assert (
        product.seconds == pytest.approx(930e-6) and product.host_seconds == pytest.approx(70e-6) and product.phase == "forward"
    )
    assert next(row for row in rows if row.name == "nccl").kind == "native kernels"
    assert sum(row.seconds for row in rows) == pytest.approx(937e-6)


ADDMM = {"Input type": ["float"] * 3, "Input Dims": [[4], [4, 4], [4, 4]]}


def test_rows_beyond_the_limit_are_summed_and_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [event("aten::mm", 100 * size, size, **{**SQUARE, "Input Dims": [[size, 4], [4, 4]]}) for size in range(1, 30)]
    everything = list_rows(events, 0.0, [])
    monkeypatch.setattr(operator_rows, "MOST_ROWS", 5)
    short = list_rows(events, 0.0, [])
    assert len(everything) == 29 and len(short) == 6 and {row.name for row in short} == {"aten::mm", "others"}
    for name in ("seconds", "flops", "moved", "calls"):
        assert sum(getattr(row, name) for row in short) == pytest.approx(sum(getattr(row, name) for row in everything))


def test_a_recorded_product_has_the_rate_that_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed around the very calls that are recorded, so that a busy machine does not matter; the bound is 15 %."""
    ceilings = DeviceCeilings(device="p", flops={"float32": 1e12}, bandwidth=1e10, source="made up")
    monkeypatch.setattr("strop.monitoring.roofline.process_roofline.find_ceilings", lambda: ceilings)
    left, right = torch.randn(500, 400), torch.randn(400, 300)
    left @ right
    assert control_profile("begin", True) == ""
    began = time.perf_counter()
    spent = 0.0
    with RECORDER.span("learner", "forward"):
        for _ in range(20):
            started = time.perf_counter()
            left @ right
            spent += time.perf_counter() - started
    thread = threading.Thread(target=lambda: torch.ones(64, 64).sum())
    thread.start()
    thread.join()
    whole = time.perf_counter() - began
    control_profile("end")
    found = control_profile("roofline")
    row = next(row for row in found.rows if row.name == "aten::mm")
    assert row.calls == 20 and row.phase == "forward" and row.flops == 20 * 2 * 500 * 400 * 300
    assert row.flops / row.seconds == pytest.approx(row.flops / spent, rel=0.15)
    assert found.operator_seconds <= whole and any(row.name == "aten::sum" for row in found.rows)
    forward = found.passes[0]
    inside = sum(row.seconds for row in found.rows if row.phase == "forward")
    assert forward.name == "forward" and inside == pytest.approx(forward.seconds, rel=1e-3)  # with what is outside of operators
    assert control_profile("roofline").rows == []  # it is forgotten
