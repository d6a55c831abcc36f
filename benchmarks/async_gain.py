"""The gain of asynchronous training: step times of the training loop with a generator and a learner of known latencies.

    python benchmarks/async_gain.py                    # constant latencies, then long tails; some minutes
    python benchmarks/async_gain.py --steps 60 --json async.json

The engine runs as many concurrent groups as one step has, each for a random time; the learner blocks its thread for a random time. Nothing
is computed, so the table measures the schedule of the loop and not a device. Strop's ``train``, stream, orders and learner thread are real;
engine and learner are simulated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from common import Spread, spread, table

from strop import metrics
from strop.algorithms.base import LossFn, TokenOutputs
from strop.algorithms.policy_gradient.grpo import GRPO
from strop.learner.base import BackwardResult
from strop.learner.client import ColumnSources, InlineCaller, LearnerClient, LearnerThread, ThreadCaller
from strop.metrics import Metrics
from strop.monitoring.trackers.base import NullTracker
from strop.rollouts.stream import DropTooOld, Fifo, GroupOrder, RolloutStream, Windowed
from strop.trainer.run import TrainingRun, TrainOptions
from strop.trainer.train import train
from strop.types import Batch, Ending, Group, Rollout, Task, Turn

WARM_UP = 4  # steps until the pipeline is full; not counted
Latency = Callable[[random.Random], float]  # seconds


def constant(seconds: float) -> Latency:
    return lambda draw: seconds


def long_tail(seconds: float) -> Latency:
    """Mean ``seconds``: most take half as long, and one in ten takes 5.5 times as long."""
    return lambda draw: seconds * (draw.uniform(4.5, 6.5) if draw.random() < 0.1 else draw.uniform(0.4, 0.6))


def jitter(seconds: float) -> Latency:
    return lambda draw: seconds * draw.uniform(0.9, 1.1)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of the table."""

    name: str
    max_staleness: int = 0
    order: str = "fifo"
    in_flight: bool = False
    steps_in_slots: int | None = None  # steps whose groups are in flight; None: k + 1


SETTINGS = (
    Setting(name="k=0"),
    Setting(name="k=1 drained", max_staleness=1),
    Setting(name="k=1 in flight", max_staleness=1, in_flight=True),
    Setting(name="k=2 drained", max_staleness=2),
    Setting(name="k=2 in flight", max_staleness=2, in_flight=True),
    Setting(name="k=2 in flight, drop_too_old", max_staleness=2, in_flight=True, order="drop_too_old"),
    Setting(name="k=4 in flight", max_staleness=4, in_flight=True),
    Setting(
        name="k=4 in flight, windowed, slots of 3 steps", max_staleness=4, in_flight=True, order="windowed", steps_in_slots=3
    ),
    Setting(
        name="k=4 in flight, windowed, slots of 2 steps", max_staleness=4, in_flight=True, order="windowed", steps_in_slots=2
    ),
    Setting(name="k=4 in flight, drop_too_old", max_staleness=4, in_flight=True, order="drop_too_old"),
)


class SimulatedEngine:
    """Runs as many concurrent groups as a step has. ``version`` changes while groups run."""

    def __init__(self, latency: Latency, at_once: int, seed: int) -> None:
        self.version = 0
        self._latency, self._seed = latency, seed
        self._room = asyncio.Semaphore(at_once)

    async def group(self, index: int) -> Group:
        version = self.version  # of the weights at the start, as in an episode
        async with self._room:
            await asyncio.sleep(self._latency(random.Random(self._seed * 1_000_003 + index)))
        return Group(index=index, environment="none", version=version, rollouts=tuple(rollout(index, i) for i in range(2)))


def rollout(index: int, sample: int) -> Rollout:
    size = 4
    turn = Turn(
        author="policy",
        tokens=torch.arange(size),
        text="",
        logprobs=torch.zeros(size),
        versions=torch.zeros(size, dtype=torch.int32),
    )
    return Rollout(
        task=Task(id=str(index)),
        sample=sample,
        seed=0,
        messages=(),
        prompt=torch.arange(2),
        turns=(turn,),
        ending=Ending.STOP,
        reward=float(sample),
    )


class InstantPublisher(NullTracker):
    """An instant weight sync, and a tracker that stores all metrics."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.logged: list[dict[str, float]] = []

    async def yield_device(self) -> None:
        pass

    async def publish(self, version: int) -> Metrics:
        self.engine.version = version
        return {}

    def log(self, step: int, metrics: Any) -> None:
        self.logged.append(dict(metrics))


class SimulatedLearner:
    """Blocks for a random time in each optimizer step."""

    def __init__(self, latency: Latency, seed: int, sleep: Callable[[float], None]) -> None:
        self._latency, self._draw, self._sleep = latency, random.Random(seed), sleep

    def score(self, batch: Batch) -> TokenOutputs:
        return TokenOutputs(logprobs=batch.rollout_logprobs, entropy=torch.ones(len(batch.target)))

    def forward_backward(self, batch: Batch, loss: LossFn) -> BackwardResult:
        self._sleep(self._latency(self._draw))
        return BackwardResult(metrics={"loss": metrics.mean(0.0, 1)}, outputs=self.score(batch))

    def step(self) -> Metrics:
        return {}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The steps of one setting after the warm-up, in seconds."""

    setting: Setting
    steps: list[float]
    waited: list[float]  # waiting for groups
    trained: list[float]
    drained: list[float]
    staleness: float  # mean over groups
    stale: int  # groups dropped because of their age

    @property
    def spread(self) -> Spread:
        return spread(self.steps)


def measure(setting: Setting, *, generation: Latency, training: Latency, groups: int, steps: int, seed: int = 0) -> Measured:
    """Run the training loop once and measure its steps."""

    async def whole() -> InstantPublisher:
        engine = SimulatedEngine(generation, groups, seed)
        publisher = InstantPublisher(engine)
        k, thread = setting.max_staleness, LearnerThread()
        trainer: Any = SimulatedLearner(training, seed, time.sleep)
        run = TrainingRun(
            options=TrainOptions(
                max_steps=steps + WARM_UP,
                groups_per_step=groups,
                max_staleness=k,
                drop_stale=setting.order == "drop_too_old",
                drain_before="never" if setting.in_flight or not k else "publishing",
            ),
            algorithm=GRPO(),
            stream=RolloutStream(
                engine.group,
                slots=(setting.steps_in_slots or k + 1) * groups,
                refill_on_release=k > 0,
                order=make_order(setting, groups),
                version=lambda: engine.version,
            ),
            learners={"policy": LearnerClient(ThreadCaller(trainer, thread) if k else InlineCaller(trainer))},
            columns=ColumnSources(frozenset(), {}),
            weights=publisher,
            tracker=publisher,
        )
        await train(run)
        await run.stream.close()
        thread.close()
        return publisher

    counted = asyncio.run(whole()).logged[WARM_UP:]

    def column(name: str) -> list[float]:
        return [line[name] for line in counted]

    return Measured(
        setting=setting,
        steps=column("timing/train/total_step_time"),
        waited=column("timing/train/generation"),
        trained=column("timing/train/policy_training"),
        drained=column("timing/train/drain"),
        staleness=mean(column("train/staleness")),
        stale=int(sum(column("train/groups_dropped_stale"))),
    )


def make_order(setting: Setting, groups: int) -> GroupOrder:
    if setting.order == "windowed":
        window = (setting.max_staleness + 1) * groups  # all groups
        return Windowed(window=window, groups_per_step=groups, max_staleness=setting.max_staleness)
    return DropTooOld() if setting.order == "drop_too_old" else Fifo()


def report(found: Sequence[Measured]) -> str:
    """Format the step times, relative to generation and training at k = 0."""
    base = found[0]
    generation, training = mean(base.waited), mean(base.trained)
    longer = max(generation, training)
    rows = [
        [
            each.setting.name,
            f"{mean(each.steps):.3f}",
            str(each.spread),
            f"{mean(each.steps) / longer:.2f}",
            f"{mean(base.steps) / mean(each.steps):.2f}",
            f"{mean(each.waited):.3f}",
            f"{mean(each.drained):.3f}",
            f"{each.staleness:.2f}",
            str(each.stale),
        ]
        for each in found
    ]
    header = ["", "s/step", "median (range)", "of max", "speed-up", "waited", "drained", "staleness", "stale"]
    note = f"at k=0: generation {generation:.3f} s, training {training:.3f} s; max {longer:.3f}, sum {generation + training:.3f}"
    return f"{note}\n{table(header, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each row")
    parser.add_argument("--groups", type=int, default=8, help="groups per step")
    parser.add_argument("--seconds", type=float, default=0.2, help="mean latency of a group, and about that of an optimizer step")
    parser.add_argument("--json", type=Path, help="write all step times to this file")
    parser.add_argument("--real", action="store_true", help="use a real model and engine (not available)")
    options = parser.parse_args()
    if options.real:
        parser.error("--real is not implemented: it needs an engine in its own process; leave it out")
    s, everything = options.seconds, {}
    kinds = {
        "constant": (constant(s), constant(s)),
        "long tails, training about as long": (long_tail(s), jitter(4 * s)),
        "long tails, training short": (long_tail(s), jitter(s)),
    }
    for name, (generation, training) in kinds.items():
        found = [
            measure(setting, generation=generation, training=training, groups=options.groups, steps=options.steps)
            for setting in SETTINGS
        ]
        print(f"{name}: {options.groups} groups a step, {options.steps} steps after {WARM_UP}\n{report(found)}\n", flush=True)
        everything[name] = [asdict(each) for each in found]
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
