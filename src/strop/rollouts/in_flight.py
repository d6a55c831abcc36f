"""Rollouts in flight: gates that admit them, and groups whose rollouts are cancelled because nothing can be learned from them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol

from strop.endings import Ending, Who
from strop.types import Rollout

POLL_SECONDS = 1.0  # between two looks at the age of a group that is not ending


class EpisodeGate(Protocol):
    """Decides when an episode may start, for example while a sandbox is full. Added to ``SampledSource.gates`` by a listener.

    Waiting at a gate does not change the age of a group or the number of groups in flight.
    """

    def admit(self, environment: str) -> AbstractAsyncContextManager[object]:
        """Wait until an episode may start; the block is the episode. An exception ends the run."""
        ...

    def observe(self, environment: str, rollout: Rollout) -> bool:
        """See how an episode ended. Return whether to sample it again, because it failed by no fault of the policy."""
        ...


async def sample_until_counted(
    environment: str, sample: Callable[[int], Awaitable[Rollout]], *, retries: int, gates: Sequence[EpisodeGate]
) -> Rollout:
    """Run ``sample(attempt)`` until it does not fail, or does so by the policy's fault, at most ``retries`` times after the first.
    Attempts that a gate asks for are not counted.
    """
    attempt = 0
    while True:
        async with AsyncExitStack() as stack:
            for gate in gates:
                await stack.enter_async_context(gate.admit(environment))
            rollout = await sample(attempt)
        refused = [gate for gate in gates if gate.observe(environment, rollout)]
        if rollout.ending is None or rollout.ending.who != Who.INFRASTRUCTURE or not (refused or retries > 0):
            return rollout
        retries -= not refused
        attempt += 1


async def gather_until_lost(
    tasks: Sequence[asyncio.Task[Rollout]], is_lost: Callable[[Sequence[Rollout]], bool] | None
) -> list[Rollout | None]:
    """Await the rollouts of a group. Once ``is_lost`` is true of those that ended, the others are cancelled and None."""
    running = set(tasks)
    try:
        while running:
            seconds = None if is_lost is None else POLL_SECONDS
            ended, running = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
            if running and is_lost is not None and is_lost([task.result() for task in tasks if task.done()]):
                break
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return [None if task.cancelled() else task.result() for task in tasks]


def is_beyond_training(ended: Sequence[Rollout], samples: int, min_rollouts: int) -> bool:
    """Return whether a group of ``samples`` rollouts, of which these have ended, will be dropped whatever the others do.

    It will if code failed without a cause, if the greedy baseline failed, or if fewer than ``min_rollouts`` are left.
    """
    failed = [rollout for rollout in ended if rollout.error is not None and not rollout.counts]
    fatal = any(rollout.ending == Ending.ERROR or rollout.sample == samples for rollout in failed)
    return fatal or (bool(failed) and samples - len(failed) < min(min_rollouts, samples))
