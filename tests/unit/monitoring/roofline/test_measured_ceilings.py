"""The ceilings of this machine: measured once, remembered, and never trusted where the file is damaged or rounds disagree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from strop.hardware.devices import device_named
from strop.monitoring.roofline import measured_ceilings
from strop.monitoring.roofline.device_ceilings import DeviceCeilings


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured_ceilings, "SECONDS", 0.004)
    monkeypatch.setattr(measured_ceilings, "SIDES", (64, 128))
    monkeypatch.setattr(measured_ceilings, "MEMORY", 1 << 20)
    monkeypatch.setattr(measured_ceilings, "AGREE", 2.0)


def test_a_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    found = measured_ceilings.measure_ceilings(1)
    assert torch.get_num_threads() == before
    assert found.flops["float32"] > 1e8 and found.bandwidth > 1e7 and found.cache_bandwidth is not None
    assert ", 1 thread" in found.device and found.source.startswith("measured on this machine on 20")
    file = next(tmp_path.rglob("ceilings-*.json"))
    monkeypatch.setattr(measured_ceilings, "_measure", lambda *_: pytest.fail("it is known"))
    assert measured_ceilings.measure_ceilings(1) == found
    file.write_text(json.dumps({**found.to_dict(), "bandwidth": -1}))
    monkeypatch.setattr(measured_ceilings, "_measure", lambda *_: (found, True))
    assert measured_ceilings.measure_ceilings(1) == found and json.loads(file.read_text()) == found.to_dict()


def test_other_threads_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ceilings = DeviceCeilings.of_device(device_named("h100"))
    monkeypatch.setattr(measured_ceilings, "_measure", lambda name, threads: (asked.append(name), (ceilings, True))[1])
    for threads in (1, 2, 1):
        measured_ceilings.measure_ceilings(threads)
    assert len(asked) == 2


def test_figures_of_a_busy_machine_are_said_to_be_so_and_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measured_ceilings, "AGREE", -1.0)
    assert "while it was busy: rounds differed by" in measured_ceilings.measure_ceilings(1).source
    assert not list(tmp_path.rglob("ceilings-*.json"))


def test_a_cache_that_cannot_be_written_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert measured_ceilings.measure_ceilings(1).bandwidth > 0


def test_the_best_of_the_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_ceilings, "AGREE", 0.06)
    rates = iter([1.0, 5.0, 3.0, 4.9, 2.0, 2.0, 9.0, 9.0])
    found, spread = measured_ceilings._measure_rounds({"a": lambda: next(rates), "b": lambda: 7.0})
    assert found == {"a": 5.0, "b": 7.0} and spread == pytest.approx(1 - 4.9 / 5)


def test_ceilings_of_the_table_and_of_a_file() -> None:
    found = DeviceCeilings.of_device(device_named("a100"))
    assert found.flops == {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12} and found.bandwidth == 2039e9
    assert DeviceCeilings.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert found.least_seconds(312e12, 1.0, "bfloat16") == 1.0 and found.least_seconds(1.0, 2039e9, "bfloat16") == 1.0
    for wrong in (
        {},
        {**found.to_dict(), "flops": {}},
        {**found.to_dict(), "flops": [1]},
        {**found.to_dict(), "flops": {"a": "x"}},
    ):
        with pytest.raises(ValueError):
            DeviceCeilings.from_dict(wrong)
