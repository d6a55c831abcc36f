"""Pace the episodes of a run: adaptive concurrency, and a circuit breaker for each environment."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from strop.config import RolloutRunConfig
from strop.endings import Ending, Who
from strop.extensions.watch.watch_config import PacingConfig
from strop.monitoring.waits import waiting
from strop.runs.monitors.run_listeners import RunSetup
from strop.runs.rollout_run import SampledSource
from strop.runs.tasks import count_slots
from strop.tools.base import InfrastructureError
from strop.trainer.listeners import RunListener, StepView
from strop.types import Rollout

OVERLOADED = (Ending.SANDBOX, Ending.PROVIDER_LIMIT)
PREEMPTED_SHARE = 0.05  # of the episodes of a step: above, the caches of the engines are too small for all that run
WINDOW = 32  # rollouts of an environment that are looked at
FEWEST = 16  # rollouts before a share means anything


@dataclass(kw_only=True)
class Pacing(RunListener):
    """Tells the concurrency about each step's preemptions, and logs ``rollouts/concurrency`` and ``rollouts/paused_seconds``."""

    concurrency: AdaptiveConcurrency | None
    breaker: CircuitBreaker | None
    name: str = field(default="pacing", init=False)
    _paused: float = 0.0  # seconds logged so far

    async def on_step(self, step: StepView) -> Mapping[str, float]:
        metrics = {}
        if self.concurrency is not None:
            self.concurrency.end_step(step.metrics.get("generation/preemptions", 0.0))
            metrics["rollouts/concurrency"] = float(int(self.concurrency.limit))
        if self.breaker is not None and self.breaker.paused > self._paused:
            metrics["rollouts/paused_seconds"] = self.breaker.paused - self._paused
            self._paused = self.breaker.paused
        return metrics


def make_pacing(setup: RunSetup) -> Pacing | None:
    """Add the gates of the section ``pacing`` to the source of a run; None if it has none."""
    config, source = setup.config, setup.source
    if not isinstance(config, RolloutRunConfig) or not isinstance(source, SampledSource):
        return None
    section, training = PacingConfig.of(config), config.rollout_training
    most = count_slots(config) * (training.num_generations_per_prompt + setup.algorithm.greedy_baseline)
    concurrency = AdaptiveConcurrency(most) if section.adaptive_concurrency else None
    breaker = None
    if section.pause_above is not None:
        pause = 60 * section.max_pause_minutes
        breaker = CircuitBreaker(share=section.pause_above, max_pause=pause, note=source.tracker.note)
    gates = [gate for gate in (breaker, concurrency) if gate is not None]
    source.gates += gates
    return Pacing(concurrency=concurrency, breaker=breaker) if gates else None


class AdaptiveConcurrency:
    """Admits at most ``limit`` episodes at once, in the order in which they asked.

    Additive increase, multiplicative decrease (Chiu and Jain, 1989), as in TCP: the limit is halved at a sign of overload, at most once
    for each round of episodes, and grows by one for each round without one.
    """

    def __init__(self, most: int) -> None:
        self.most = most  # bound by the slots of the run
        self.limit = float(most)
        self.running = 0
        self.ended = 0  # since ``start_step``
        self._peak = 0  # running at once since the last cut
        self._unheeded = 0  # episodes of the round of the last cut, whose signs of overload are not new
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def admit(self, environment: str) -> AsyncIterator[None]:
        if self._waiting or self.running >= int(self.limit):
            await self._wait()
        else:
            self.running += 1
        self._peak = max(self._peak, self.running)
        try:
            yield
        finally:
            self.running -= 1
            self._wake()

    def observe(self, environment: str, rollout: Rollout) -> bool:
        self.ended += 1
        if self._unheeded:
            self._unheeded -= 1
        elif rollout.ending in OVERLOADED:
            self.cut()
        if rollout.ending not in OVERLOADED:
            self.limit = min(self.limit + 1 / self.limit, self.most)
        self._wake()
        return False

    def end_step(self, preemptions: float) -> None:
        """Take in the number of requests that engines preempted during a step."""
        if preemptions > PREEMPTED_SHARE * self.ended:
            self.cut()
        self.ended = 0

    def cut(self) -> None:
        """Halve the limit. What the episodes that run now report of an overload is as old as this cut, and is not heeded."""
        self.limit = max(1.0, min(self.limit, self._peak) / 2)
        self._unheeded = self._peak = self.running

    async def _wait(self) -> None:
        """Wait for a place, which is counted when it is given."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            with waiting("episode", on="a place among the episodes in flight (pacing.adaptive_concurrency)"):
                await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.running -= 1
                self._wake()
            raise

    def _wake(self) -> None:
        while self._waiting and self.running < int(self.limit):
            place = self._waiting.popleft()
            if not place.done():  # cancelled while it waited
                self.running += 1
                place.set_result(None)


@dataclass(kw_only=True)
class Outage:
    """A pause of one environment."""

    began: float  # seconds of the event loop
    reason: str
    delay: float  # seconds until the next test
    testing: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the one rollout that tests the environment
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(kw_only=True)
class CircuitBreaker:
    """Pauses an environment that has worked and of whose last rollouts more than ``share`` failed by its infrastructure."""

    share: float
    max_pause: float  # seconds
    note: Callable[[str], None]
    first_delay: float = 1.0  # seconds; doubles after each failed test, up to ``longest_delay``
    longest_delay: float = 60.0
    outages: dict[str, Outage] = field(default_factory=dict)
    paused: float = 0.0  # seconds of all outages that are over
    _failed: dict[str, deque[bool]] = field(default_factory=dict)
    _worked: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def admit(self, environment: str) -> AsyncIterator[None]:
        """Raises InfrastructureError once the environment has been paused for too long."""
        outage = self.outages.get(environment)
        async with AsyncExitStack() as stack:
            if outage is not None:
                with waiting("episode", on=f"environment {environment}, which is paused: {outage.reason}"):
                    await stack.enter_async_context(outage.testing)
                    await self._delay(environment, outage)
                if outage.over.is_set():
                    await stack.aclose()  # only a test holds up the others
            yield

    async def _delay(self, environment: str, outage: Outage) -> None:
        """Wait until the next test is due, or the outage is over."""
        left = outage.began + self.max_pause - asyncio.get_running_loop().time()
        if left <= 0 and not outage.over.is_set():
            raise InfrastructureError(
                f"environment {environment} has been paused for {self.max_pause / 60:g} minutes (pacing.max_pause_minutes), because "
                f"its infrastructure fails: {outage.reason}. Mend it and start the run again: it continues from its last checkpoint"
            )
        with suppress(TimeoutError):
            await asyncio.wait_for(outage.over.wait(), min(outage.delay, left))
        outage.delay = min(2 * outage.delay, self.longest_delay)

    def observe(self, environment: str, rollout: Rollout) -> bool:
        if rollout.ending == Ending.ABORTED:
            return False
        failed = rollout.ending is not None and rollout.ending.who == Who.INFRASTRUCTURE
        outage = self.outages.get(environment)
        if outage is not None:
            if not failed:
                self._end(environment, outage)
            return failed
        last = self._failed.setdefault(environment, deque(maxlen=WINDOW))
        last.append(failed)
        if not failed:
            self._worked.add(environment)
        elif environment in self._worked and len(last) >= FEWEST and sum(last) > self.share * len(last):
            self._begin(environment, rollout)
            return True
        return False

    def _begin(self, environment: str, rollout: Rollout) -> None:
        last = self._failed.pop(environment)
        self.outages[environment] = Outage(
            began=asyncio.get_running_loop().time(), reason=str(rollout.error), delay=self.first_delay
        )
        self.note(
            f"environment {environment} is paused: {sum(last)} of its last {len(last)} rollouts failed by no fault of the policy, the "
            f"last one because {rollout.error}. It is tested until it works, for at most {self.max_pause / 60:g} minutes "
            "(pacing.pause_above, pacing.max_pause_minutes)"
        )

    def _end(self, environment: str, outage: Outage) -> None:
        del self.outages[environment]
        outage.over.set()
        seconds = asyncio.get_running_loop().time() - outage.began
        self.paused += seconds
        self.note(f"environment {environment} works again, after {seconds:.0f} s")
