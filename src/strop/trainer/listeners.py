"""Listeners attach to a run and observe each of its steps, as a ``StepView`` with its times. The loop names none of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from strop.algorithms.base import LossFn, Outputs
from strop.monitoring.process_profile import RECORDER
from strop.monitoring.rollout_store.rollout_record import DropReason
from strop.monitoring.trackers.base import Tracker
from strop.monitoring.waits import WaitKind, waiting
from strop.stopping import EndRun
from strop.types import Batch, Group
from strop.user_code import describe_error

# The watchdog limit that applies to each phase. Other phases have no limit, or contain waits with their own limits.
PHASE_KINDS: Mapping[str, WaitKind] = {
    "drain": "generation",
    "logprobs": "training",
    "policy_training": "training",
    "weight_sync": "weight_sync",
    "checkpointing": "checkpoint",
}


class StepTimer:
    """Records the seconds of each phase of a step: ``with timer.span("packing"):``."""

    def __init__(self) -> None:
        self.start_step()

    def start_step(self) -> None:
        self.started = self.ended = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Add the time of the block to a phase, and register the phase with the watchdog meanwhile."""
        started = time.perf_counter()
        with waiting("training loop", on=phase, kind=PHASE_KINDS.get(phase, "")):
            yield
        ended = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + ended - started
        RECORDER.add("training loop", phase, started, ended)

    def metrics(self, *, tokens_read: int, tokens_sampled: int | None) -> dict[str, float]:
        """Return the seconds of each phase, and the tokens per second of the step, of generation and of training.

        ``tokens_sampled`` None means recorded rollouts, which have no generation rate.
        """
        self.ended = time.perf_counter()
        total = self.ended - self.started
        logged = {f"timing/train/{phase}": seconds for phase, seconds in self.seconds.items()}
        logged["timing/train/total_step_time"] = total
        logged["performance/tokens_per_sec"] = tokens_read / (total - self.seconds.get("validation", 0.0))
        if tokens_sampled is not None:
            logged["performance/generation_tokens_per_sec"] = tokens_sampled / max(self.seconds["generation"], 1e-9)
        logged["performance/training_tokens_per_sec"] = tokens_read / max(self.seconds["policy_training"], 1e-9)
        return logged


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerPass:
    """A forward and backward pass of a learner over a mini-batch."""

    learner: str  # that its loss is for: "policy" for every policy
    policy: int = 0  # number of the policy (``strop.data.rollout_selector``)
    index: Tensor  # [n] int64: indices of the predicted tokens that it trained on
    batch: Batch  # the mini-batch as the loss read it
    outputs: Outputs
    loss: LossFn


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateResult:
    """What the update of a step computed."""

    old_outputs: Outputs  # the policy's outputs for the batch, before the first optimizer step
    metrics: Mapping[str, float]
    passes: Sequence[OptimizerPass] = ()  # in order


@dataclass(frozen=True, kw_only=True, eq=False)
class StepView:
    """A step after its weights were published."""

    step: int
    groups: Sequence[Group]  # trained on
    dropped: Sequence[tuple[Group, DropReason]]
    batch: Batch
    result: UpdateResult
    metrics: Mapping[str, float]  # metrics of the loop and of the listeners called before this one
    timer: StepTimer
    tracker: Tracker  # for notes


class RunListener:
    """Observes a run from start to end. Override only the methods you need.

    A method that raises EndRun ends the run once the step is stored, saved and logged; with any other exception the listener is
    reported and detached, and the run goes on.
    """

    name: str  # identifies its state in checkpoints, and the listener in messages
    warnings: Sequence[str] = ()  # what the end of the run repeats

    async def on_start(self, step: int, tracker: Tracker) -> None:
        """The weights of ``step`` are published; the step after it is next."""

    async def on_step(self, step: StepView) -> Mapping[str, float]:
        """Return further metrics of a step. They are part of its checkpoint."""
        return {}

    async def on_log(self, step: StepView) -> Mapping[str, float]:
        """Return further metrics of a step that has been validated and saved; its metrics include the timings."""
        return {}

    async def state_dict(self) -> Any:
        """Return the state to save, as plain values; None: there is none."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Continue from what ``state_dict`` returned."""

    async def on_end(self) -> None:
        """The run has ended, or failed. Called once."""


@dataclass
class Listeners:
    """The listeners of a run, in the order in which they are called."""

    attached: list[RunListener] = field(default_factory=list)
    detached: list[str] = field(default_factory=list)  # names of those that failed
    refusal: EndRun | None = None  # the first of the step

    def __post_init__(self) -> None:
        names = [each.name for each in self.attached]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"several listeners are called {', '.join(twice)}: a checkpoint keeps their states by name; rename one"
            )

    def attach(self, *listeners: RunListener) -> None:
        self.attached += listeners

    async def on_start(self, step: int, tracker: Tracker) -> None:
        """Raises EndRun for a run that must not continue."""
        for listener in tuple(self.attached):
            await self._call(tracker, listener, "on_start", step, tracker)
        self.check()

    async def on_step(self, step: StepView) -> dict[str, float]:
        """Return the metrics of a step with those of all listeners."""
        return await self._collect("on_step", step)

    async def on_log(self, step: StepView) -> dict[str, float]:
        """Return the metrics to log."""
        return await self._collect("on_log", step)

    def check(self) -> None:
        """Raise EndRun if a listener ends the run."""
        if self.refusal is not None:
            raise self.refusal

    async def state_dict(self, tracker: Tracker) -> dict[str, Any]:
        """Return the states of all listeners that have one, by name."""
        states = {each.name: await self._call(tracker, each, "state_dict") for each in tuple(self.attached)}
        return {name: state for name, state in states.items() if state is not None}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for listener in self.attached:
            if listener.name in states:
                listener.load_state_dict(states[listener.name])

    async def on_end(self, tracker: Tracker) -> None:
        for listener in tuple(self.attached):
            await self._call(tracker, listener, "on_end")

    async def _collect(self, method: str, step: StepView) -> dict[str, float]:
        metrics = dict(step.metrics)
        for listener in tuple(self.attached):
            metrics |= await self._call(step.tracker, listener, method, replace(step, metrics=metrics)) or {}
        return {**metrics, "health/listener_failed": 1.0} if self.detached else metrics

    async def _call(self, tracker: Tracker, listener: RunListener, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(listener, method)(*arguments)
        except EndRun as refusal:
            self.refusal = self.refusal or refusal
        except Exception as error:  # no step depends on a listener
            self.attached.remove(listener)
            self.detached.append(listener.name)
            tracker.note(
                f"warning: the listener {listener.name} failed and is detached: {describe_error(error)}. The run goes on"
            )
        return None
