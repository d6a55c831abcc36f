"""A circuit breaker for each environment: while its infrastructure fails, its episodes wait instead of failing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from strop.endings import Ending, Who
from strop.monitoring.waits import waiting
from strop.tools.base import InfrastructureError
from strop.types import Rollout

WINDOW = 32  # rollouts of an environment that are looked at
FEWEST = 16  # rollouts before a share means anything


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
