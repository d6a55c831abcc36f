"""An environment whose answers take a random time, of the wall clock: what it says depends on the conversation alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from loop.graded import Graded
from strop.environments.base import reward
from strop.types import Messages, Rollout, Task, user


@dataclass(frozen=True, kw_only=True)
class Disturbed(Graded):
    """Dialogues of up to three turns, which are longer where the policy says a 7 or a 1. ``longest``: seconds of an answer."""

    longest: float = 0.01

    async def _take_time(self) -> None:
        draw = random.SystemRandom().random()  # unlike in every other run
        if draw > 0.3:
            await asyncio.sleep(self.longest * draw * draw)

    async def prompt(self, task: Task) -> Messages:
        await self._take_time()
        return super().prompt(task)

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        await self._take_time()
        turns = len(rollout.policy_turns)
        return (user(f"{turns}"),) if turns < 3 and any(digit in rollout.text for digit in "71") else None

    @reward(weight=0.1)
    async def late(self, task: Task, rollout: Rollout) -> float:
        await self._take_time()
        return float(len(rollout.policy_turns))


@dataclass(frozen=True, kw_only=True)
class DisturbedGroups(Disturbed):
    """One reward is of the whole group, and takes its time too."""

    @reward(weight=0.5, group=True)
    async def rank(self, task: Task, rollouts: Sequence[Rollout]) -> list[float]:
        await self._take_time()
        lengths = [len(rollout.text) for rollout in rollouts]
        return [sum(other > length for other in lengths) / len(lengths) for length in lengths]
