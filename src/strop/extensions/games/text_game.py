"""The base of games for one player that are played in text, a state and steps that the policy's turns make; and guessing a number."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

from strop.data.sources.records import DataError, is_held_out
from strop.data.sources.source import DataSource
from strop.environments.base import DEFAULT_NUM_TASKS, Environment, EnvironmentConfigError, GeneratedTasks, reward
from strop.sampling import mix_seed
from strop.types import Messages, Rollout, Task, user

StateT = TypeVar("StateT")
TaskT = TypeVar("TaskT", bound=Task)
MAX_ATTEMPTS = 1000  # draws until a task belongs to the requested split


@dataclass(frozen=True)
class GameStep(Generic[StateT]):
    """What a turn of the policy does to a game."""

    state: StateT  # after the turn
    observation: str  # that the policy reads next
    points: float = 0.0  # earned by this turn
    over: bool = False
    won: bool = False


@dataclass(frozen=True, kw_only=True)
class TextGame(Environment[TaskT], Generic[TaskT, StateT]):
    """A game is replayed from its rollout, so an episode has no separate state and plays the same in any process."""

    held_out_fraction: float = (
        0.2  # of all games, reserved for validation with every seed; 0: validation draws from the same games
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.held_out_fraction < 1:
            raise EnvironmentConfigError(f"held_out_fraction is {self.held_out_fraction}; set it to at least 0 and below 1")

    @abstractmethod
    def make_task(self, random: Random) -> TaskT:
        """Draw a game. Its id must describe it completely: it decides on which side of the split the game is."""

    @abstractmethod
    def first_state(self, task: TaskT) -> StateT: ...

    @abstractmethod
    def step(self, task: TaskT, state: StateT, text: str) -> GameStep[StateT]:
        """Return what a turn does. ``text`` was written by the policy: it may be anything."""

    def describe_state(self, state: StateT) -> str:
        """Return a text that is equal for equal states, for algorithms that compare turns taken in the same state."""
        return repr(state)

    def tasks(self, data: DataSource) -> Sequence[TaskT]:
        return GeneratedTasks(data.size or DEFAULT_NUM_TASKS, draw_split(self.make_task, data, self.held_out_fraction))

    def play(self, task: TaskT, rollout: Rollout) -> list[GameStep[StateT]]:
        """Return the step of each turn of the policy."""
        steps: list[GameStep[StateT]] = []
        state = self.first_state(task)
        for turn in rollout.policy_turns:
            steps.append(self.step(task, state, turn.content))
            state = steps[-1].state
        return steps

    async def respond(self, task: TaskT, rollout: Rollout) -> Messages | None:
        step = self.play(task, rollout)[-1]
        return None if step.over else (user(step.observation),)

    def turn_states(self, task: TaskT, rollout: Rollout) -> Sequence[str]:
        states = [self.first_state(task), *(step.state for step in self.play(task, rollout))]
        return [self.describe_state(state) for state in states[:-1]]

    @reward(weight=1.0, accuracy=True)
    def won(self, task: TaskT, rollout: Rollout) -> bool:
        return any(step.won for step in self.play(task, rollout))


def draw_split(make: Callable[[Random], TaskT], data: DataSource, held_out_fraction: float) -> Callable[[int], TaskT]:
    """Return a function that draws task i from its own random numbers, until it is on the requested side of the split."""

    def draw(index: int) -> TaskT:
        random = Random(mix_seed(data.seed, data.held_out, index))
        for _ in range(MAX_ATTEMPTS):
            task = make(random)
            if not held_out_fraction or is_held_out(task.id, held_out_fraction) == data.held_out:
                return task
        side = "validation" if data.held_out else "training"
        raise DataError(
            f"none of {MAX_ATTEMPTS} games that were drawn is for {side}: make the games larger, or change held_out_fraction "
            f"({held_out_fraction}; 0 draws both sides from the same games)"
        )

    return draw


def read_tag(text: str, tag: str) -> str | None:
    """Return what the last ``<tag>`` of a text encloses, in any case, without white space around it; None if it is not closed."""
    lower = text.lower()
    start = lower.rfind(f"<{tag}>")
    if len(lower) != len(text) or start < 0:  # a character whose lower case is longer would shift the indices
        start = text.rfind(f"<{tag}>")
        lower = text
    if start < 0:
        return None
    start += len(tag) + 2
    end = lower.find(f"</{tag}>", start)
    return None if end < 0 else text[start:end].strip()


_NUMBER = re.compile(r"\d{1,18}")


@dataclass(frozen=True)
class GuessingState:
    """What is known of the number, so that equal states are equally good."""

    lowest: int
    highest: int
    guesses: int = 0


@dataclass(frozen=True, kw_only=True)
class NumberGuessing(TextGame[Task, GuessingState]):
    """Each turn's last number is a guess; an answer without a number is one too. By halving, ``max_guesses`` of log2(highest) + 1 do."""

    highest: int = 100
    max_guesses: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.highest < 2 or self.max_guesses < 1:
            raise EnvironmentConfigError(
                f"highest is {self.highest} and max_guesses is {self.max_guesses}; set highest to at least 2 and max_guesses to at least 1"
            )

    def make_task(self, random: Random) -> Task:
        secret = random.randint(1, self.highest)
        question = (
            f"I think of a whole number from 1 to {self.highest}. Find it in at most {self.max_guesses} guesses. "
            "Answer with one number; I say whether mine is higher or lower."
        )
        return Task(id=f"number_guessing:{secret}", question=question, answer=str(secret))

    def first_state(self, task: Task) -> GuessingState:
        return GuessingState(1, self.highest)

    def step(self, task: Task, state: GuessingState, text: str) -> GameStep[GuessingState]:
        secret, numbers, guesses = int(task.answer), _NUMBER.findall(text), state.guesses + 1
        if not numbers:
            after, said, found = GuessingState(state.lowest, state.highest, guesses), "That is not a number.", False
        else:
            guess = int(numbers[-1])
            found, said = guess == secret, "Higher." if guess < secret else "Lower."
            lowest = max(state.lowest, guess + 1) if guess < secret else state.lowest
            highest = min(state.highest, guess - 1) if guess > secret else state.highest
            after = GuessingState(lowest, highest, guesses)
        return GameStep(after, f"{said} Guess again.", over=found or guesses >= self.max_guesses, won=found)
