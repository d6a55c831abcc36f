"""The peak of this machine: measured once, remembered, and never trusted where the file is damaged or rounds disagree."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from strop.runs.monitors import measured_peak
from strop.runs.monitors.measured_peak import MeasuredPeak


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured_peak, "SECONDS", 0.004)
    monkeypatch.setattr(measured_peak, "SIDES", (64, 128))
    monkeypatch.setattr(measured_peak, "AGREE", 2.0)


def test_a_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    found = measured_peak.measure_peak(1)
    assert torch.get_num_threads() == before
    assert found.peak("float32") > 1e8 and found.peak("fp8") == max(found.flops.values())
    assert ", 1 thread" in found.device and found.source.startswith("measured on this machine on 20")
    file = next(tmp_path.rglob("peak-*.json"))
    monkeypatch.setattr(measured_peak, "_measure", lambda *_: pytest.fail("it is known"))
    assert measured_peak.measure_peak(1) == found
    monkeypatch.setattr(measured_peak, "_measure", lambda *_: (found, True))
    for damaged in ("{", "[]", json.dumps({**asdict(found), "flops": {"float32": -1, "bfloat16": 1}})):
        file.write_text(damaged)
        assert measured_peak.measure_peak(1) == found and json.loads(file.read_text()) == asdict(found)


def test_other_threads_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    peak = MeasuredPeak(device="p", flops={"float32": 1e9, "bfloat16": 2e9}, source="measured")
    monkeypatch.setattr(measured_peak, "_measure", lambda name, threads: (asked.append(name), (peak, True))[1])
    for threads in (1, 2, 1):
        measured_peak.measure_peak(threads)
    assert len(asked) == 2
