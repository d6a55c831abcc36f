"""Games that are stepped: an observation, an action, a reward, until the game is over."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from strop.data.sources.source import DataSource
from strop.environments.base import DEFAULT_NUM_TASKS, Environment, GeneratedTasks, reward
from strop.sampling import mix_seed
from strop.types import Messages, Rollout, Task, system, user


@dataclass(frozen=True, kw_only=True)
class SeededTask(Task):
    """A game, which follows from its seed."""

    seed: int
    index: int


@dataclass(frozen=True)
class SteppedAnswer:
    """What follows an action."""

    text: str  # what the policy reads next; not read when the game is over
    reward: float | None = None
    over: bool = False
    invalid: bool = False  # the text was no action, and the game is where it was


class SteppedGame(Protocol):
    """A game while an episode plays it."""

    async def start(self) -> str:
        """Return the first observation."""

    async def step(self, text: str) -> SteppedAnswer:
        """Take the action that the policy's text asks for."""

    async def close(self) -> None: ...


@dataclass
class _Play:
    """How far an episode has played its game."""

    game: SteppedGame
    opening: str
    steps: list[SteppedAnswer] = field(default_factory=list)  # one for each turn of the policy that was taken

    @property
    def over(self) -> bool:
        return bool(self.steps) and self.steps[-1].over

    @property
    def total(self) -> float:
        return sum(step.reward or 0.0 for step in self.steps)


_current_play: ContextVar[_Play] = ContextVar("strop_stepped_game")


@dataclass(frozen=True, kw_only=True)
class SteppedEnvironment(Environment[SeededTask]):
    """Plays a game with the policy: the base of the adapters to libraries of games."""

    system_prompt: str = ""  # the first message of each conversation; "" for none
    solved_at: float | None = (
        None  # sum of an episode's rewards from which it counts as solved; null: as the game says, else above 0
    )

    @abstractmethod
    async def open_game(self, task: SeededTask) -> SteppedGame: ...

    def tasks(self, data: DataSource) -> Sequence[SeededTask]:
        kind = "validation" if data.held_out else "train"

        def make(index: int) -> SeededTask:
            seed = mix_seed(data.seed, data.held_out, index) % 2**31
            return SeededTask(id=f"{self.game_name}:{data.seed}:{kind}:{index}", seed=seed, index=index)

        return GeneratedTasks(data.size or DEFAULT_NUM_TASKS, make)

    @property
    @abstractmethod
    def game_name(self) -> str:
        """The name of the game in the ids of tasks."""

    def session(self, task: SeededTask) -> AbstractAsyncContextManager[None]:
        return self._play(task)

    @asynccontextmanager
    async def _play(self, task: SeededTask) -> AsyncIterator[None]:
        game = await self.open_game(task)
        try:
            token = _current_play.set(_Play(game, await game.start()))
            try:
                yield
            finally:
                _current_play.reset(token)
        finally:
            await game.close()

    async def prompt(self, task: SeededTask) -> Messages:
        if (play := _current_play.get(None)) is None:  # somebody looks at the task, and plays no episode
            async with self.session(task):
                return await self.prompt(task)
        opening = user(play.opening)
        return (system(self.system_prompt), opening) if self.system_prompt else (opening,)

    async def respond(self, task: SeededTask, rollout: Rollout) -> Messages | None:
        play = _current_play.get()
        step = await play.game.step(rollout.content)
        play.steps.append(step)
        return None if step.over else (user(step.text),)

    @reward(weight=1.0, per_turn=True)
    def score(self, task: SeededTask, rollout: Rollout) -> list[float | None]:
        """The game's own rewards, each for the turn that earned it. A turn that was cut off is not played."""
        play = _current_play.get()
        rollout.metrics["over"] = play.over
        rollout.metrics["invalid_actions"] = sum(step.invalid for step in play.steps)
        earned = [step.reward for step in play.steps]
        return [*earned, *[None] * (len(rollout.policy_turns) - len(earned))]

    @reward(weight=0.0, accuracy=True)
    def solved(self, task: SeededTask, rollout: Rollout) -> bool:
        play = _current_play.get()
        least = self.solved_at if self.solved_at is not None else self.default_solved_at
        return play.total > 0 if least is None else play.total >= least

    @property
    def default_solved_at(self) -> float | None:
        return None
