"""Number guessing: the policy finds a number by asking, and is told whether it is higher or lower."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from strop.environments.base import EnvironmentConfigError
from strop.extensions.games.text_game import GameStep, TextGame
from strop.types import Task

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
