"""Fakes for the parts of a run, without torch modules: a virtual clock, a generator, a learner, an environment, a tracker."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from strop import metrics
from strop.algorithms.base import Algorithm, LossFn, TokenOutputs
from strop.checkpointing.base import RunState
from strop.data.sources.source import DataSource
from strop.environments.base import Environment, GeneratedTasks, reward
from strop.environments.handle import EnvironmentHandle, LocalEnvironment
from strop.generation.base import Completion
from strop.learner.base import BackwardResult
from strop.learner.client import ColumnSources
from strop.metrics import Metrics
from strop.models.chat_template import ChatTemplate
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.rollouts.episode import EpisodeRules, run_group
from strop.rollouts.stream import RolloutStream
from strop.runs.monitors.run_listeners import RolloutRecorder
from strop.sampling import Sampling
from strop.stopping import EarlyStop
from strop.trainer.evaluation import Evaluator
from strop.trainer.listeners import Listeners
from strop.trainer.mismatch import MismatchGuard
from strop.trainer.run import TrainingRun, TrainOptions
from strop.types import Batch, Group, Rollout, Task
from strop.weight_sync.in_process import InProcessWeights
from support.algorithms import grpo

T = TypeVar("T")


class _VirtualClock(selectors.SelectSelector):
    """A virtual clock that jumps to the next timer instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("deadlock: all tasks wait, and no timer is pending")
        self.now += max(timeout, 0.0)
        return super().select(0)


def _run_at_once(loop: asyncio.AbstractEventLoop, executor: object, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run what is meant for a thread: it takes no virtual time."""
    done = loop.create_future()
    try:
        done.set_result(function(*arguments))
    except Exception as error:
        done.set_exception(error)
    return done


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like ``asyncio.run``, on a virtual clock. A deadlock raises immediately."""

    def make_loop() -> asyncio.AbstractEventLoop:
        clock = _VirtualClock()
        loop = asyncio.SelectorEventLoop(clock)
        loop.time = lambda: clock.now  # type: ignore[method-assign]
        loop.run_in_executor = partial(_run_at_once, loop)  # type: ignore[assignment,method-assign]
        return loop

    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(coroutine)


@dataclass
class Request:
    prompt: list[int]
    sampling: Sampling
    seed: int
    session: str


Script = Callable[[Request], tuple[list[int], bool]]  # returns (tokens, stopped)


@dataclass
class FakeGenerator:
    """Generates by a script, or else random letters and an end token that depend on the seed."""

    tokenizer: Any
    script: Script | None = None
    latency: Callable[[int], float] = lambda seed: 0.0
    version: int = 0
    requests: list[Request] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        request = Request(list(prompt), sampling, seed, session)
        self.requests.append(request)
        await asyncio.sleep(self.latency(seed))
        tokens, stopped = (self.script or self._letters)(request)
        if len(tokens) > sampling.max_new_tokens:
            tokens, stopped = tokens[: sampling.max_new_tokens], False
        return Completion(
            tokens=torch.tensor(tokens),
            logprobs=-torch.arange(1, len(tokens) + 1, dtype=torch.float32) / 8,
            versions=torch.full((len(tokens),), self.version, dtype=torch.int32),
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            stopped=stopped,
        )

    def _letters(self, request: Request) -> tuple[list[int], bool]:
        draw = random.Random(request.seed)
        text = "".join(draw.choice("abc") for _ in range(draw.randint(1, 3)))
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id], True

    async def drain(self) -> None:
        self.events.append("drain")

    def resume(self, version: int) -> None:
        self.version = version
        self.events.append(f"resume {version}")

    async def close(self) -> None:
        self.events.append("close")


@dataclass(frozen=True, kw_only=True)
class Letters(Environment[Task]):
    """The reward is the share of the letter a. ``broken`` lists the indices of tasks whose reward raises."""

    size: int = 1000
    broken: tuple[int, ...] = ()
    constant: tuple[int, ...] = ()  # indices of tasks with constant rewards

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return GeneratedTasks(data.size or self.size, lambda index: Task(id=str(index), question=f"task {index}"))

    @reward(weight=1.0, accuracy=True)
    def share(self, task: Task, rollout: Rollout) -> float:
        if int(task.id) in self.broken:
            raise ZeroDivisionError(f"the verifier of task {task.id} is broken")
        return 1.0 if int(task.id) in self.constant else rollout.text.count("a") / max(len(rollout.text), 1)


@dataclass
class FakeLearner:
    """Scores with the rollout log-probabilities plus ``shift``, which every step increases by 0.1."""

    shift: float = 0.0
    batches: list[Batch] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    scored: int = 0
    steps: int = 0
    on_step: Callable[[], None] = lambda: None

    def _logprobs(self, batch: Batch) -> torch.Tensor:
        return batch.rollout_logprobs + self.shift

    async def score(self, batch: Batch) -> TokenOutputs:
        self.scored += 1
        return TokenOutputs(logprobs=self._logprobs(batch), entropy=torch.ones(len(batch.target)))

    async def forward_backward(self, batch: Batch, loss: LossFn) -> BackwardResult:
        self.batches.append(batch)
        logprobs = self._logprobs(batch).requires_grad_()
        value, logged = loss(TokenOutputs(logprobs, torch.ones(len(batch.target))), batch)
        value.backward()
        self.outputs.append(logprobs.detach())
        return BackwardResult(
            metrics=logged, outputs=TokenOutputs(logprobs=logprobs.detach(), entropy=torch.ones(len(batch.target)))
        )

    async def step(self) -> Metrics:
        self.on_step()
        self.steps += 1
        self.shift += 0.1
        return {"grad_norm": metrics.mean(float(self.steps), 1)}

    def weights(self) -> Any:
        return iter([("shift", torch.tensor(self.shift))])

    def save(self, folder: Path, optimizer: bool = True) -> None:
        (folder / "weights").mkdir(parents=True)
        (folder / "weights" / "model.txt").write_text(repr(self.shift))
        if optimizer:
            (folder / "optimizer.txt").write_text(str(self.steps))

    def load(self, folder: Path) -> None:
        self.shift = float((folder / "weights" / "model.txt").read_text())
        self.steps = int((folder / "optimizer.txt").read_text())


@dataclass
class Recorder:
    """A tracker that stores everything."""

    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    order: list[int] = field(default_factory=list)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.order.append(step)
        self.steps[step] = {**self.steps.get(step, {}), **metrics}

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, text: str) -> None:
        pass

    def resume(self, step: int) -> None:
        self.steps = {known: logged for known, logged in self.steps.items() if known <= step}

    def close(self) -> None:
        pass


@dataclass
class FakeCheckpoints:
    saved: list[RunState] = field(default_factory=list)

    def save(self, state: RunState, learners: Mapping[str, Any]) -> Path:
        self.saved.append(state)
        return Path(f"step_{state.step}")

    def finish(self) -> None:
        pass


@dataclass
class Tasks:
    """Serves one environment's tasks in order."""

    environment: Environment[Any]
    tasks: Sequence[Task]

    def __len__(self) -> int:
        return len(self.tasks)

    def at(self, index: int) -> tuple[str, EnvironmentHandle[Any], Task]:
        return "letters", self.environment, self.tasks[index % len(self.tasks)]


def make_run(
    tokenizer: Any,
    folder: Path,
    options: TrainOptions,
    *,
    environment: Environment[Any] | None = None,
    algorithm: Algorithm | None = None,
    learners: Mapping[str, Any] | None = None,
    samples: int = 4,
    tasks: int | None = None,
    validation: int = 0,
    checkpoints: Any = None,
    early_stop: EarlyStop | None = None,
    store: str = "none",
    scorers: Mapping[str, Any] | None = None,
    latency: Callable[[int], float] = lambda seed: 0.0,
) -> tuple[TrainingRun, FakeGenerator, Recorder]:
    """Build a run with the real loop, stream, episodes and packing, and fakes for the rest. ``tasks`` None: no limit."""
    environment, algorithm = environment or Letters(), algorithm or grpo()
    generator = FakeGenerator(tokenizer, latency=latency)
    template, sampling, rules = ChatTemplate(tokenizer), Sampling(max_new_tokens=8), EpisodeRules(max_length=200)
    source = Tasks(LocalEnvironment(environment), environment.tasks(DataSource(size=tasks)))

    async def group(index: int) -> Group:
        name, env, task = source.at(index)
        return await run_group(
            index, name, env, task,
            samples=samples, generator=generator, template=template, sampling=sampling, rules=rules, seed=7,
        )  # fmt: skip

    tracker = Recorder()
    evaluator = None
    if validation:
        evaluator = Evaluator(
            source=source, size=validation, samples=2, generator=generator, template=template, sampling=sampling, rules=rules, seed=1,
        )  # fmt: skip
    slots = (options.max_staleness + 1) * options.groups_per_step
    run = TrainingRun(
        options=options,
        algorithm=algorithm,
        stream=RolloutStream(group, slots=slots, size=tasks, refill_on_release=options.max_staleness > 0),
        learners=learners or {"policy": FakeLearner()},
        columns=ColumnSources(algorithm.requires, scorers or {}),
        weights=InProcessWeights([generator]),
        tracker=tracker,
        evaluator=evaluator,
        early_stop=early_stop,
        checkpoints=checkpoints,
        listeners=make_listeners(RolloutStore(folder, store), algorithm),  # type: ignore[arg-type]
    )
    return run, generator, tracker


def make_listeners(store: RolloutStore, algorithm: Algorithm) -> Listeners:
    return Listeners([MismatchGuard(), RolloutRecorder(store=store, algorithm=algorithm)])


def stored_rollouts(run: TrainingRun) -> RolloutStore:
    (recorder,) = [each for each in run.listeners.attached if isinstance(each, RolloutRecorder)]
    return recorder.store
