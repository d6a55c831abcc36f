"""A generator with its own weights that runs concurrently with the learner, on the virtual clock of ``loop.fakes``.

Its samples depend only on (seed, position, weights version); its timing depends on a separate clock seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from loop.fakes import FakeLearner, Letters, Recorder, Tasks, make_listeners
from strop import metrics
from strop.algorithms.base import Algorithm, LossFn
from strop.checkpointing.base import RunState
from strop.data.sources.source import DataSource
from strop.environments.base import Environment
from strop.environments.handle import LocalEnvironment
from strop.generation.base import Completion
from strop.learner.base import BackwardResult
from strop.learner.client import ColumnSources
from strop.metrics import Metrics
from strop.models.chat_template import ChatTemplate
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.rollouts.episode import EpisodeRules, run_group
from strop.rollouts.stream import Fifo, GroupOrder, RolloutStream
from strop.sampling import Sampling, mix_seed
from strop.trainer.evaluation import Evaluator
from strop.trainer.run import TrainingRun, TrainOptions
from strop.types import Batch, Group, Messages, Rollout, Task, user
from support.algorithms import grpo


@dataclass
class SeparateGenerator:
    """Samples token by token, each with the current weights."""

    tokenizer: Any
    clock: random.Random
    pace: float = 1.0  # time scale
    version: int = -1
    shift: float = 0.0  # the weights
    running: int = 0
    sampled: int = 0  # tokens so far
    most_versions: int = 0  # within one completion

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        letters = self.tokenizer("abc", add_special_tokens=False)["input_ids"]
        length = 1 + mix_seed(seed, 1) % 5
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        self.running += 1
        try:
            for position in range(length):
                await asyncio.sleep(self.pace * self.clock.expovariate(1.0) * (10 if self.clock.random() < 0.05 else 1))
                drawn = mix_seed(seed, position, self.version)
                tokens.append(self.tokenizer.eos_token_id if position == length - 1 else letters[drawn % len(letters)])
                logprobs.append(-(1 + drawn % 7) / 8 - self.shift / 100)
                versions.append(self.version)
                self.sampled += 1
        finally:
            self.running -= 1
        self.most_versions = max(self.most_versions, len(set(versions)))
        return Completion(
            tokens=torch.tensor(tokens),
            logprobs=torch.tensor(logprobs),
            versions=torch.tensor(versions, dtype=torch.int32),
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            stopped=True,
        )

    async def close(self) -> None:
        pass


@dataclass
class CopiedWeights:
    """Sends the learner's single weight, which takes one second and does not wait for running generations."""

    generator: SeparateGenerator
    learner: FakeLearner
    running_at_publish: list[int] = field(default_factory=list)

    async def yield_device(self) -> None:
        pass

    async def publish(self, version: int) -> Metrics:
        self.running_at_publish.append(self.generator.running)
        await asyncio.sleep(self.generator.pace)
        self.generator.shift, self.generator.version = self.learner.shift, version
        return {"weights/publish_seconds": metrics.total(1.0)}


@dataclass
class SlowLearner(FakeLearner):
    """Takes a random time, during which the event loop continues."""

    clock: random.Random = field(default_factory=lambda: random.Random(0))
    generator: SeparateGenerator | None = None
    generating: int = 0  # optimizer steps during which tokens were sampled

    async def forward_backward(self, batch: Batch, loss: LossFn) -> BackwardResult:
        before = self.generator.sampled if self.generator else 0
        await asyncio.sleep(self.clock.uniform(0, 8))
        self.generating += self.generator is not None and self.generator.sampled > before
        return await super().forward_backward(batch, loss)


@dataclass(frozen=True, kw_only=True)
class Dialogue(Letters):
    """Adds a second turn after a random delay."""

    clock: random.Random = field(default_factory=lambda: random.Random(0))
    pace: float = 1.0

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        await asyncio.sleep(self.pace * self.clock.expovariate(1.0))
        return [user("again")] if len(rollout.policy_turns) < 2 else None


@dataclass
class Checkpoints:
    """Stores what survives a kill: the states of the loop and of the learner."""

    saved: list[tuple[RunState, float, int]] = field(default_factory=list)

    def save(self, state: RunState, learners: Any) -> Path:
        self.saved.append((state, learners["policy"].shift, learners["policy"].steps))
        return Path(f"step_{state.step}")


def separate_run(
    tokenizer: Any,
    folder: Path,
    options: TrainOptions,
    *,
    clock: int,
    pace: float = 1.0,
    learner: SlowLearner | None = None,
    order: GroupOrder | None = None,
    algorithm: Algorithm | None = None,
    tasks: int | None = None,
    validation: int = 0,
    checkpoints: Checkpoints | None = None,
    scaling: Any = None,
) -> tuple[TrainingRun, SeparateGenerator, Recorder]:
    """Build a run with the real loop, stream and episodes, resumed from the last of ``checkpoints``. ``clock`` seeds all durations."""
    times = random.Random(clock)
    generator = SeparateGenerator(tokenizer, times, pace)
    learner = learner or SlowLearner(clock=times)
    learner.generator = generator
    saved = checkpoints.saved[-1] if checkpoints and checkpoints.saved else None
    if saved is not None:
        learner.shift, learner.steps = saved[1], saved[2]
    environment: Environment[Any] = Dialogue(broken=(2, 11, 23), constant=(4, 5, 9, 14, 30), clock=times, pace=pace)
    template, sampling = ChatTemplate(tokenizer), Sampling(max_new_tokens=8)
    rules = EpisodeRules(max_length=200, max_turns=3, scaling=scaling)
    source = Tasks(LocalEnvironment(environment), environment.tasks(DataSource(size=tasks)))

    async def group(index: int) -> Group:
        name, env, task = source.at(index)
        return await run_group(
            index, name, env, task,
            samples=3, generator=generator, template=template, sampling=sampling, rules=rules, seed=7,
        )  # fmt: skip

    evaluator = None
    if validation:
        evaluator = Evaluator(
            source=source, size=validation, samples=1, generator=generator, template=template, sampling=sampling, rules=rules, seed=1,
        )  # fmt: skip
    tracker = Recorder()
    run = TrainingRun(
        options=options,
        algorithm=algorithm or grpo(),
        stream=RolloutStream(
            group,
            slots=(options.max_staleness + 1) * options.groups_per_step,
            size=tasks,
            state=saved[0].stream if saved else None,
            refill_on_release=options.max_staleness > 0,
            order=order or Fifo(),
            version=lambda: generator.version,
        ),
        learners={"policy": learner},
        columns=ColumnSources(frozenset(), {}),
        weights=CopiedWeights(generator, learner),
        tracker=tracker,
        evaluator=evaluator,
        checkpoints=checkpoints,
        listeners=make_listeners(RolloutStore(folder, "jsonl"), algorithm or grpo()),
        step=saved[0].step if saved else 0,
    )
    return run, generator, tracker
