"""Step times of a plan beside published ones, and what they depend on."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.hardware.devices import device_named
from strop.planning.learner_memory import LearnerSetup
from strop.planning.sharding import Sharding
from strop.planning.step_time import StepClock, StepLayout, StepWork

ROOT = Path(__file__).parents[3]
BOUND = 0.25


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("plan_step_times")


def test_the_page_has_every_published_row_with_its_error(bench):
    assert bench.make_table() in (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")


def test_all_published_steps_are_within_a_quarter(bench):
    errors = {f"{step.gpus} {step.device} {step.model}": bench.error(step) for step in bench.STEPS}

    assert {name: error for name, error in errors.items() if abs(error) > BOUND} == {}


def make_clock(bench: Any, model: str = "Qwen3-30B-A3B", **work: Any) -> StepClock:
    layout = StepLayout(device=device_named("h100"), training_devices=32, generation_devices=32, engine_size=2)
    rollouts = {"rollouts": 2048, "prompt": 200, "completion": 3000, "longest": 4096} | work
    learner = LearnerSetup(tokens=8192, longest=4096, on_cpu=False, compute_bytes=2, weight_bytes=2)
    return StepClock(bench.MODELS[model], StepWork(**rollouts), layout, learner)


def shard(clock: StepClock, **sharding: Any) -> StepClock:
    return replace(clock, learner=replace(clock.learner, sharding=Sharding(**sharding)))


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
    wider = replace(clock, layout=replace(clock.layout, training_devices=64))

    assert wider.time_step().training == pytest.approx(clock.time_step().training / 2)


def test_ranks_without_a_rollout_of_an_optimizer_step_wait_for_the_others(bench):
    clock = make_clock(bench, optimizer_steps=128)  # 16 rollouts for 32 ranks

    assert clock.time_step().training == pytest.approx(2 * make_clock(bench).time_step().training)


def test_a_cache_with_room_for_fewer_sequences_takes_longer(bench):
    clock = make_clock(bench)
    times = [replace(clock, layout=replace(clock.layout, room=room)).time_generation() for room in (None, 128, 64, 16)]

    assert times[0] == times[1]  # an engine has 128 of them
    assert times[1] < times[2] < times[3]


def test_several_steps_ahead_keep_as_many_batches_in_flight(bench):
    one, two, eight = (make_clock(bench, steps_ahead=steps).time_generation() for steps in (1, 2, 8))

    assert one > two > eight


def test_collectives_between_nodes_take_longer_than_within_one(bench):
    inside, outside = (
        shard(make_clock(bench), optimizer_shards=32, expert=expert, expert_optimizer_shards=32 // expert).time_learner()
        for expert in (8, 16)
    )

    assert outside > inside


def test_the_stage_with_the_output_layer_is_waited_for(bench):
    even, with_output = (shard(make_clock(bench), stages=stages).time_learner() for stages in (1, 16))

    assert with_output > 2 * even  # a head as large as five layers, beside stages of three


def test_weights_that_are_gathered_for_short_micro_batches_are_waited_for(bench):
    clock = shard(make_clock(bench), shards=32, expert_shards=32)
    short = replace(clock, learner=replace(clock.learner, tokens=512))

    assert short.time_learner() > 2 * clock.time_learner()
