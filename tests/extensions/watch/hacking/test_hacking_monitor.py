"""Planted hacks are found within a number of steps, and honest runs are left alone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from strop.base_config import validate_section
from strop.extensions.watch import watch_config
from strop.extensions.watch.hacking_monitor import DETECTORS, EProcess, Grader, HackingMonitor, RewardHacked
from strop.monitoring.rollout_store.rollout_flags import RolloutFlag
from strop.monitoring.trackers.base import NullTracker
from strop.types import Group, Rollout, Task
from support.simulated_policies import HACKS, HONEST, Policy, hacks_length, learns, needs_length, needs_length_badly, sample_step
from support.sweep import sweep_rows

PAGE = Path(__file__).parents[4] / "docs" / "reward_hacking.md"
STEPS = 60
OF_TEXTS = tuple(name for name in DETECTORS if name not in ("second_grader", "judges"))


class Notes(NullTracker):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def make_monitor(*names: str, **options: Any) -> HackingMonitor:
    return HackingMonitor(detectors=[DETECTORS[name]() for name in names or OF_TEXTS], **options)


async def follow(
    monitor: HackingMonitor, steps: Sequence[Sequence[Group]], first: int = 1
) -> tuple[list[dict[str, float]], list[str]]:
    tracker = Notes()
    logged = [await monitor.after_step(step, groups, tracker) for step, groups in enumerate(steps, first)]
    await monitor.settle()
    return logged, tracker.notes


def run(monitor: HackingMonitor, policy: Policy, seed: int = 0, steps: int = STEPS) -> tuple[list[dict[str, float]], list[str]]:
    return asyncio.run(follow(monitor, [sample_step(policy, step, steps, seed) for step in range(steps)]))


def alarms(monitor: HackingMonitor) -> set[str]:
    return {name for name, state in monitor.states.items() if state.alarm is not None}


def first_alarm(logged: Sequence[dict[str, float]], name: str) -> int | None:
    return next((step for step, metrics in enumerate(logged, 1) if f"monitor/{name}_alarm" in metrics), None)


@pytest.mark.parametrize("name", HACKS)
def test_each_planted_hack_is_found(name: str) -> None:
    logged, notes = run(make_monitor(), HACKS[name])
    found = first_alarm(logged, name)
    assert found is not None and found <= 50
    warning = next(note for note in notes if f"({name})" in note)
    assert warning.startswith("warning:") and f"docs/reward_hacking.md#{name}" in warning
    assert "sample" in warning and "strop rollouts LOG_DIR --step" in warning


@pytest.mark.parametrize(("name", "seed"), sweep_rows(product(HONEST, range(3)), *((name, 0) for name in HONEST)))
def test_honest_runs_are_left_alone(name: str, seed: int) -> None:
    _, notes = run(make_monitor(), HONEST[name], seed)
    assert not notes


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_share_of_false_alarms_over_240_honest_runs_is_below_the_stated_rate() -> None:
    warned = 0
    for seed in range(48):
        for policy in HONEST.values():
            monitor = make_monitor()
            run(monitor, policy, seed)
            warned += bool(alarms(monitor))
    assert warned <= 0.01 * 240


def test_right_answers_that_need_some_length_are_no_alarm_and_a_threshold_on_length_is_one() -> None:
    """The limit of what texts can tell: where longer is always better, only a second grader knows whether it should be."""
    monitor = make_monitor()
    run(monitor, needs_length)
    assert not alarms(monitor)
    monitor = make_monitor()
    run(monitor, needs_length_badly)
    assert alarms(monitor) == {"length"}


def is_right(task: Task, rollout: Rollout) -> bool:
    return rollout.text.endswith(f" {task.answer}")


async def is_right_sometimes(task: Task, rollout: Rollout) -> float:
    return float(is_right(task, rollout)) if Random(rollout.text).random() < 0.9 else 0.5


def test_a_second_grader_that_drifts_away_is_found_and_one_that_agrees_is_not() -> None:
    monitor = make_monitor("second_grader", second_grader=is_right)
    logged, notes = run(monitor, HACKS["duplicate_answers"])
    assert (found := first_alarm(logged, "second_grader")) is not None and found <= 45 and len(notes) == 1
    for seed, grader in enumerate((is_right, is_right_sometimes)):
        monitor = make_monitor("second_grader", second_grader=grader)
        assert not run(monitor, learns, seed)[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("grader", [is_right, is_right_sometimes])
def test_second_graders_that_agree_are_left_alone(grader: Grader, seed: int) -> None:
    assert not run(make_monitor("second_grader", second_grader=grader), learns, seed)[1]


def test_from_an_alarm_on_the_rollouts_that_show_it_are_flagged_and_no_honest_ones() -> None:
    flagged: list[list[RolloutFlag]] = []
    for what in (HACKS["duplicate_answers"], learns):
        monitor = make_monitor("duplicate_answers", "second_grader", second_grader=is_right)
        flagged.append([])
        for step in range(50):
            asyncio.run(follow(monitor, [sample_step(what, step, STEPS, 3)], step + 1))
            flagged[-1] += monitor.flags
    hacked, honest = flagged
    assert {flag.detector for flag in hacked} == {"duplicate_answers", "second_grader"} and not honest
    assert all(len([each for each in hacked if (each.step, each.detector) == (flag.step, flag.detector)]) <= 5 for flag in hacked)


def guesses(task: Task, rollout: Rollout) -> float:
    return Random(f"{rollout.text}{guesses.__name__}{next(_calls)}").random() > 0.5


_calls = iter(range(10**9))


def test_judges_that_disagree_are_found_and_consistent_ones_are_not() -> None:
    monitor = make_monitor("judges", judges=(guesses, guesses))
    logged, _ = run(monitor, learns, steps=40)
    assert (found := first_alarm(logged, "judges")) is not None and found <= 40
    monitor = make_monitor("judges", judges=(is_right, is_right_sometimes))
    assert not run(monitor, learns)[1]


def test_a_grader_that_fails_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def fails(task: Task, rollout: Rollout) -> float:
        raise ConnectionError("no answer")

    monitor = make_monitor("second_grader", second_grader=fails)
    logged, notes = run(monitor, learns, steps=4)
    assert not notes and logged[-1]["monitor/failed_grades"] == 24
    assert caplog.text.count("a grader of the monitor failed") == 1 and "ConnectionError: no answer" in caplog.text


def test_a_resumed_monitor_continues_exactly() -> None:
    steps = [sample_step(HACKS["duplicate_answers"], step, STEPS, 3) for step in range(40)]

    def make() -> HackingMonitor:
        return make_monitor(*DETECTORS, second_grader=is_right, judges=(is_right, is_right_sometimes))

    whole = make()
    expected, _ = asyncio.run(follow(whole, steps))
    for cut in (3, 20, 35):
        begun, resumed = make(), make()
        asyncio.run(follow(begun, steps[:cut]))
        resumed.restore(json.loads(json.dumps(begun.state())))
        again, _ = asyncio.run(follow(resumed, steps[cut:], cut + 1))
        assert again == expected[cut:]
        assert resumed.state() == whole.state()


def test_an_alarm_stops_the_run_only_if_that_was_asked_for() -> None:
    for stop_on in ((), ("length",)):
        monitor = make_monitor(stop_on=stop_on)
        monitor.check_stop()
        run(monitor, hacks_length)
        if stop_on:
            with pytest.raises(RewardHacked, match=r"monitor.stop_on names length: in \d+% of the pairs"):
                monitor.check_stop()
        else:
            monitor.check_stop()


def test_graders_work_while_the_loop_goes_on() -> None:
    async def slow(task: Task, rollout: Rollout) -> float:
        await asyncio.sleep(0.2)
        return 1.0

    async def measure(grader: Grader) -> float:
        monitor = make_monitor("second_grader", second_grader=grader)
        started = time.perf_counter()
        await monitor.after_step(1, sample_step(learns, 0, 10, 0), Notes())
        taken = time.perf_counter() - started
        await monitor.settle()
        assert len(monitor.graded) == 8
        return taken

    assert asyncio.run(measure(slow)) < 0.15


def test_an_e_process_rarely_reaches_the_bound_under_the_null_and_soon_does_under_the_alternative() -> None:
    reached = 0
    for seed in range(300):
        random, process = Random(seed), EProcess()
        reached += max(process.update([float(random.random() < 0.3)], 0.3) for _ in range(300)) >= 20
    assert reached <= 0.05 * 300
    random, process = Random(1), EProcess()
    assert max(process.update([float(random.random() < 0.8)], 0.3) for _ in range(100)) >= 1000


def test_a_change_late_in_a_run_is_found() -> None:
    random, process = Random(1), EProcess()
    for _ in range(500):
        process.update([float(random.random() < 0.2)], 0.3)
    assert max(process.update([float(random.random() < 0.9)], 0.3) for _ in range(60)) >= 1000


def test_the_page_has_every_detector_and_the_section_names_them_all() -> None:
    headings = [line.removeprefix("### ") for line in PAGE.read_text().splitlines() if line.startswith("### ")]
    assert headings == list(DETECTORS) == list(watch_config.DETECTORS)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"detectors": ["lenght"]}, "there is no detector 'lenght'; did you mean 'length'?"),
        ({"stop_on": ["second_grader"]}, "names 'second_grader', which is not applied: it needs monitor.second_grader"),
        ({"stop_on": ["length"], "enabled": False}, "names 'length', which is not applied: monitor.detectors or monitor.enabled"),
        ({"detectors": ["judges"]}, "names 'judges', which needs monitor.judges"),
    ],
)
def test_detectors_that_cannot_be_applied_are_errors(values: dict[str, Any], said: str) -> None:
    problems = list(validate_section(watch_config.MonitorConfig, values).errors("monitor"))
    assert len(problems) == 1 and said in problems[0].message
