"""Asynchronous training beside a generator with weights of its own: what overlaps, what repeats, what a kill leaves."""

from __future__ import annotations

import asyncio
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loop.fakes import FakeLearner, Recorder, make_run, run_virtually, stored_rollouts
from loop.side_by_side import Checkpoints, SlowLearner, separate_run
from loop.tiny import tiny_tokenizer
from strop.monitoring.rollout_store.rollout_record import RolloutRecord
from strop.rollouts.reward_shaping_config import RewardScalingConfig
from strop.rollouts.stream import DropTooOld, Fifo, GroupOrder, Windowed
from strop.trainer.run import TrainOptions
from strop.trainer.train import train
from support.algorithms import grpo
from support.clients import threaded_client
from support.sweep import sweep

pytestmark = pytest.mark.slow

TOKENIZER = tiny_tokenizer()
G, K = 2, 2
ORDERS: dict[str, GroupOrder] = {
    "fifo": Fifo(),
    "windowed": Windowed(window=4, groups_per_step=G, max_staleness=K),
    "drop_too_old": DropTooOld(),
}
DRAINING, IN_FLIGHT = {"drain_before": "publishing"}, {"drain_before": "never"}
each_order = pytest.mark.parametrize("kind", list(ORDERS))
ALL = {
    f"{when}-{kind}": (kind, changes) for when, changes in (("drained", DRAINING), ("in flight", IN_FLIGHT)) for kind in ORDERS
}
each_order_and_publish = pytest.mark.parametrize("name", sweep(ALL, "drained-fifo", "in flight-drop_too_old"))


def options(**changes: Any) -> TrainOptions:
    return TrainOptions(**{"max_steps": 8, "groups_per_step": G, "max_staleness": K, **DRAINING, **changes})


def play(folder: Path, *, clock: int, kind: str = "fifo", changes: dict[str, Any] | None = None, **parts: Any) -> Any:
    """A whole run; what it was made of."""
    changes = {"drop_stale": kind == "drop_too_old", **(changes or {})}
    run, generator, tracker = separate_run(TOKENIZER, folder, options(**changes), clock=clock, order=ORDERS[kind], **parts)

    async def whole() -> None:
        await train(run)
        await run.stream.close()

    run_virtually(whole())
    return run, generator, tracker


def make_records(run: Any) -> list[RolloutRecord]:
    return list(stored_rollouts(run).read_all())


def without_clocks(tracker: Any) -> dict[int, dict[str, float]]:
    unclocked = ("timing/", "performance/", "perf/", "system/", "validation/seconds")
    return {step: {k: v for k, v in logged.items() if not k.startswith(unclocked)} for step, logged in tracker.steps.items()}


# --- drained, or in flight ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clocks", sweep([2, 5], 2))
@each_order
def test_drained_every_rollout_is_of_one_version(tmp_path, kind, clocks):
    for clock in range(clocks):
        run, generator, _ = play(tmp_path / str(clock), clock=clock, kind=kind)
        assert run.weights.running_at_publish == [0] * 9 and generator.most_versions == 1
        for record in make_records(run):
            versions = {version for version in record.versions if version >= 0}
            assert len(versions) == 1 and (not record.kept or 0 <= record.step - 1 - versions.pop() <= K)


@pytest.mark.parametrize("clocks", sweep([4, 6], 4))
def test_drained_and_fifo_a_run_is_repeated_whatever_the_clock(tmp_path, clocks):
    first, _, told = play(tmp_path / "0", clock=0, validation=3, changes={"val_period": 2})
    for clock in range(1, clocks):
        again, _, heard = play(tmp_path / str(clock), clock=clock, validation=3, changes={"val_period": 2})
        assert without_clocks(heard) == without_clocks(told)
        assert make_records(again) == make_records(first)
        assert again.learners["policy"].shift == first.learners["policy"].shift


@pytest.mark.parametrize("clocks", sweep([3, 5], 3))
def test_in_flight_publishing_waits_for_nobody_and_every_token_knows_its_version(tmp_path, clocks):
    waited = mixed = 0
    for clock in range(clocks):
        run, generator, tracker = play(tmp_path / str(clock), clock=clock, changes=IN_FLIGHT)
        waited += sum(run.weights.running_at_publish)
        mixed += generator.most_versions > 1
        for record in make_records(run):
            versions = [version for version in record.versions if version >= 0]
            assert versions == sorted(versions) and (not record.kept or record.step - 1 - versions[0] <= K)
        assert max(tracker.steps[step]["train/staleness_max"] for step in tracker.steps) <= K
    assert waited > 0 and mixed == clocks


@pytest.mark.parametrize("changes", [DRAINING, IN_FLIGHT])
def test_generation_goes_on_while_the_learner_trains(tmp_path, changes):
    run, _, _ = play(tmp_path, clock=3, changes=changes)
    assert run.learners["policy"].generating >= 6, "in most of the 8 steps"


def test_a_synchronous_run_has_nothing_to_drain_and_generates_nothing_meanwhile(tmp_path):
    results = []
    for name, changes in {"a": DRAINING, "b": IN_FLIGHT}.items():
        run, _, tracker = play(tmp_path / name, clock=0, changes={**changes, "max_staleness": 0})
        assert run.weights.running_at_publish == [0] * 9 and run.learners["policy"].generating == 0
        results.append(without_clocks(tracker))
    assert results[0] == results[1]


class Sleepy(FakeLearner):
    async def forward_backward(self, batch: Any, loss: Any) -> Any:
        await asyncio.sleep(TRAINING)
        return await super().forward_backward(batch, loss)


class Clocked(Recorder):
    """When each step was over, on the virtual clock."""

    def log(self, step: int, metrics: Any) -> None:
        super().log(step, {**metrics, "seconds": asyncio.get_running_loop().time()})

    @property
    def seconds(self) -> list[float]:
        ends = [self.steps[step]["seconds"] for step in sorted(self.steps)]
        return [after - before for before, after in pairwise(ends)]


TRAINING = 10.0


@pytest.mark.parametrize("generating", [2.0, 10.0, 14.0])
@pytest.mark.parametrize("changes", [DRAINING, IN_FLIGHT], ids=["drained", "in flight"])
def test_one_step_ahead_a_step_takes_as_long_as_the_longer_of_its_halves(tmp_path, changes, generating):
    found = {}
    for k in (0, 1):
        run, *_ = make_run(
            TOKENIZER,
            tmp_path,
            options(max_staleness=k, **changes),
            latency=lambda seed: generating,
            learners={"policy": Sleepy()},
        )
        run.tracker = tracker = Clocked()
        run_virtually(train(run))
        found[k] = tracker.seconds[2:]
    assert found[0] == pytest.approx([generating + TRAINING] * 5)
    if changes is DRAINING or generating <= TRAINING:
        assert found[1] == pytest.approx([max(generating, TRAINING)] * 5)
    else:  # two steps' groups are in flight at once, and this engine serves all of them as fast
        assert sum(found[1]) / 5 <= generating


class Blocking(SlowLearner):
    """Computes, as the event loop sees it."""

    seconds = 0.15

    async def forward_backward(self, batch: Any, loss: Any) -> Any:
        before = self.generator.sampled if self.generator else 0
        time.sleep(self.seconds)
        self.generating += self.generator is not None and self.generator.sampled > before
        return await super(SlowLearner, self).forward_backward(batch, loss)


def test_a_learner_in_a_thread_learns_the_same_while_episodes_of_several_turns_go_on(tmp_path):
    runs = {}
    for name in ("blocking", "beside"):
        learner = Blocking()
        run, _, _ = separate_run(TOKENIZER, tmp_path / name, options(max_steps=5), clock=0, pace=0.01, learner=learner)
        if name == "beside":
            run.learners = {"policy": threaded_client(learner)}
        asyncio.run(train(run))
        runs[name] = run, learner
    assert runs["blocking"][1].generating == 0 and runs["beside"][1].generating >= 3
    assert make_records(runs["blocking"][0]) == make_records(runs["beside"][0])
    assert runs["blocking"][1].shift == runs["beside"][1].shift


def test_an_interrupted_run_leaves_no_call_of_the_learner_behind(tmp_path):
    learner = Blocking()
    run, _, _ = separate_run(TOKENIZER, tmp_path, options(), clock=0, pace=0.001, learner=learner)
    run.learners = {"policy": threaded_client(learner)}
    calls: list[str] = []

    async def whole() -> None:
        training = asyncio.create_task(train(run))
        while not learner.batches:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # in the middle of a step
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        assert training.cancelled()
        calls.append(f"{len(learner.batches)} {learner.steps}")
        await run.stream.close()
        await asyncio.sleep(0.3)
        calls.append(f"{len(learner.batches)} {learner.steps}")

    asyncio.run(whole())
    assert calls[0] == calls[1], "nothing was computed after the run had ended"


# --- what else a run does -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clocks", sweep([2, 4], 2))
@each_order_and_publish
def test_dynamic_sampling_shaping_validation_and_checkpoints_work(tmp_path, name, clocks):
    kind, changes = ALL[name]
    checkpoints = Checkpoints()
    stale = 0
    for clock in range(clocks):
        run, _, tracker = play(
            tmp_path / str(clock), clock=clock, kind=kind, validation=3, checkpoints=checkpoints, algorithm=grpo(drop_constant_groups=True),
            scaling=RewardScalingConfig(source_max=1.0, target_min=-1.0, target_max=3.0),
            changes={**changes, "max_steps": 10, "val_period": 3, "val_at_start": True, "save_period": 2},
        )  # fmt: skip
        assert run.step == 10 and [state.step for state, *_ in checkpoints.saved] == [2, 4, 6, 8, 10]
        assert [step for step, logged in tracker.steps.items() if "validation/accuracy" in logged] == [0, 3, 6, 9]
        logged = [tracker.steps[step] for step in range(1, 11)]
        assert sum(line["train/groups_dropped_for_errors"] for line in logged) >= 1
        assert sum(line["train/groups_dropped_by_filter"] for line in logged) >= 3
        assert all(line["train/groups_without_signal"] == 0 and line["train/staleness_max"] <= K for line in logged)
        assert all(-1 <= line["train/reward"] <= 3 for line in logged) and any(line["train/reward"] < 0 for line in logged)
        records = make_records(run)
        kept = {record.group for record in records if record.kept}
        assert len(kept) == 10 * G and kept.isdisjoint({2, 4, 5, 9, 11, 14})
        stale += sum(line["train/groups_dropped_stale"] for line in logged)
        assert {record.dropped_because for record in records} <= {None, "error", "filtered", "stale"}
        checkpoints.saved.clear()
    assert (stale > 0) == (kind == "drop_too_old" and changes is IN_FLIGHT)


def test_the_tasks_end_once_every_group_was_used(tmp_path):
    for kind in ORDERS:
        run, _, tracker = play(tmp_path / kind, clock=1, kind=kind, tasks=13, changes={"max_steps": 100, **IN_FLIGHT})
        assert run.step >= 4 and "all tasks are used" in tracker.notes[-1]
        groups = [record.group for record in make_records(run)]
        assert len(groups) == 3 * len(set(groups)), "none came twice"


def test_a_hopeless_filter_is_not_blamed_on_groups_that_were_too_old(tmp_path):
    run, _, _ = play(tmp_path, clock=0, kind="drop_too_old", changes={"max_groups_per_step": G + 2, **IN_FLIGHT, "max_steps": 12})
    assert run.step == 12


# --- kills ------------------------------------------------------------------------------------------------------------------


def killed(folder: Path, kind: str, checkpoints: Checkpoints, *, clock: int, after: float | None, **changes: Any) -> Any:
    """A run from its newest checkpoint that ends after so many seconds of its clock, or by itself."""
    run, _, tracker = separate_run(
        TOKENIZER, folder, options(save_period=1, drop_stale=kind == "drop_too_old", **changes),
        clock=clock, order=ORDERS[kind], checkpoints=checkpoints, algorithm=grpo(drop_constant_groups=True),
    )  # fmt: skip
    stored_rollouts(run).resume(run.step)
    groups = {group.index: group for group in checkpoints.saved[-1][0].stream.finished} if checkpoints.saved else {}

    async def whole() -> None:
        training = asyncio.create_task(train(run))
        await asyncio.wait([training], timeout=after)
        if training.done():
            training.result()
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await run.stream.close()

    run_virtually(whole())
    return run, tracker, groups


@pytest.mark.parametrize("count", sweep([2, 8], 2))
@each_order_and_publish
def test_killed_at_any_time_a_run_keeps_what_was_finished_and_trains_on_every_group_once(tmp_path, name, count):
    kind, changes = ALL[name]
    buffered = 0
    for seed in range(count):
        folder, draw, checkpoints = tmp_path / str(seed), random.Random(seed), Checkpoints()
        for attempt in range(40):
            after = draw.uniform(5, 40) if attempt < 6 else None
            run, _, restored = killed(
                folder, kind, checkpoints, clock=1000 * seed + attempt, after=after, max_steps=12, **changes
            )
            for record in make_records(run):  # a finished group is used as it was, not sampled again
                if record.group in restored:
                    group = restored[record.group]
                    assert list(record.versions) == [
                        v for turn in group.rollouts[record.sample].turns for v in turn.versions.tolist()
                    ]
            buffered += len(restored)
            if run.step == 12:
                break
        records = make_records(run)
        identities = [(record.group, record.sample) for record in records]
        assert len(identities) == len(set(identities)), "no rollout is used twice"
        state = checkpoints.saved[-1][0].stream
        waiting = {group.index for group in state.finished} | {*state.unfinished}
        assert {group for group, _ in identities} | waiting == set(range(state.next_index)), "none is lost"
        assert waiting.isdisjoint({group for group, _ in identities})
        assert len({record.group for record in records if record.kept}) == 12 * G
        for record in records:
            first = next((version for version in record.versions if version >= 0), record.step - 1)
            assert not record.kept or 0 <= record.step - 1 - first <= K
    assert buffered > count


@pytest.mark.parametrize("seeds", sweep([2, 6], 2))
def test_drained_and_fifo_a_killed_run_ends_as_if_nothing_had_happened(tmp_path, seeds):
    whole, _, _ = killed(tmp_path / "whole", "fifo", Checkpoints(), clock=0, after=None, max_steps=12)
    for seed in range(seeds):
        draw, checkpoints, kills = random.Random(seed), Checkpoints(), 0
        for attempt in range(40):
            after = draw.uniform(5, 60) if attempt < 6 else None
            run, _, _ = killed(tmp_path / str(seed), "fifo", checkpoints, clock=99 * seed + attempt, after=after, max_steps=12)
            kills += run.step < 12
            if run.step == 12:
                break
        assert kills and make_records(run) == make_records(whole)
        assert run.learners["policy"].shift == whole.learners["policy"].shift
