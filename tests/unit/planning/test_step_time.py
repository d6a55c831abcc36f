"""Step times of a plan beside published ones, and what they depend on."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.hardware.devices import device_named
from strop.planning.step_time import StepClock, StepLayout, StepWork

ROOT = Path(__file__).parents[3]
MISSES = 1  # rows that docs/planning.md says are off by more than a quarter


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("plan_step_times")


def test_the_page_has_every_published_row_with_its_error(bench):
    assert bench.make_table() in (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")


def test_all_published_steps_but_those_that_the_page_names_are_within_a_quarter(bench):
    errors = [abs(bench.error(step)) for step in bench.STEPS]

    assert sum(error > 0.25 for error in errors) == MISSES
    assert max(errors) < 0.4


def make_clock(bench: Any, **work: Any) -> StepClock:
    layout = StepLayout(device=device_named("h100"), training_devices=32, generation_devices=32, engine_size=2, replicas=32)
    rollouts = {"rollouts": 2048, "prompt": 200, "completion": 3000, "longest": 4096} | work
    return StepClock(bench.MODELS["Qwen3-30B-A3B"], StepWork(**rollouts), layout)


def test_a_reference_costs_a_forward_pass(bench):
    without, scored = (make_clock(bench, scores=scores).time_step() for scores in (0, 1))

    assert without.logprobs == 0
    assert scored.logprobs == pytest.approx(scored.training / 3)
    assert scored.total == pytest.approx(without.total + scored.logprobs)


def test_generation_and_training_beside_each_other_take_as_long_as_the_longer(bench):
    clock = make_clock(bench, steps_ahead=1)
    beside = replace(clock, layout=replace(clock.layout, shared=False)).time_step()

    assert beside.overlaps
    assert beside.total < beside.generation + beside.training
    assert beside.total >= max(beside.generation, beside.training)


def test_twice_the_devices_train_in_half_the_time(bench):
    clock = make_clock(bench)
    wider = replace(clock, layout=replace(clock.layout, training_devices=64, replicas=64))

    assert wider.time_step().training == pytest.approx(clock.time_step().training / 2)
