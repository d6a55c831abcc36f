"""When the answer of an environment counts, in ticks of the engine's clock (``strop.rollouts.repeat.engine_clock``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True, order=True)
class AnswerId:
    """One answer of an environment: what it says to a rollout, up to its next request or its end."""

    group: int
    part: int  # the sample; ``GROUP_REWARDS`` for the rewards of the whole group
    number: int  # 0 for what comes before the first request


GROUP_REWARDS = 1 << 30
NEVER = 1 << 60  # a tick


class ReplayEnded(RuntimeError):
    """A run asks for events that are not in the file it replays. The message says which and what to do."""


class AnswerTimes(Protocol):
    """Says at which tick an answer counts that was asked for at another one."""

    waits: ClassVar[bool]  # whether the engine waits for answers; False: they count from the tick at which they have come

    def due(self, answer: AnswerId, asked: int) -> int | None:
        """Return the tick from which the answer counts; None if that is when it comes."""
        ...


@dataclass(frozen=True)
class FixedDelay:
    """Every answer takes ``delay`` ticks: the engine goes on for so long, then waits for it."""

    delay: int = 0
    waits: ClassVar[bool] = True

    def due(self, answer: AnswerId, asked: int) -> int | None:
        return asked + self.delay


@dataclass(frozen=True)
class AsTheyCome:
    """The engine waits for no answer while it has other work. What happened when can be recorded, and replayed."""

    waits: ClassVar[bool] = False

    def due(self, answer: AnswerId, asked: int) -> int | None:
        return None


@dataclass(frozen=True)
class ReplayedTimes:
    """Every answer counts when it did in a recorded run."""

    ticks: Mapping[AnswerId, int]
    source: str  # the file, for messages
    waits: ClassVar[bool] = True

    def due(self, answer: AnswerId, asked: int) -> int | None:
        """Return the recorded tick, ``NEVER`` if the recorded run ended before. Raises ReplayEnded if the two runs differ."""
        tick = self.ticks.get(answer, NEVER)
        if tick < asked:
            part = "the rewards" if answer.part == GROUP_REWARDS else f"sample {answer.part}"
            raise ReplayEnded(
                f"{part} of group {answer.group} asks for answer {answer.number} at tick {asked}, in {self.source} it counts at {tick}: "
                "the two runs differ in more than the order of their events, for instance in the configuration, the data, an environment "
                "that draws at random, or the machine. Replay the run that was recorded, or set replay_events to null"
            )
        return tick
